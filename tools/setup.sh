#!/bin/bash
# Installs what nvct needs for work on it: Debian packages where the thing itself is missing (as root), and the virtual
# environment .venv. Everything that it does is announced in one line; when all is there it says nothing and takes no time.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

# What is needed: the package, what proves that it is there (a command, a file pattern that begins with /, or a command that
# must need no library), and whether nothing works without it. The thing counts, not the package: docker may well come from elsewhere.
needs='
python3         /usr/bin/python3                 always
python3-venv    /usr/lib/python3*/ensurepip      always
gcc             gcc                              always
libc6-dev       /usr/include/stdio.h             always
make            make                             always
runc            runc                             containers
docker.io       dockerd                          containers
containerd      ctr                              containers
podman          podman                           containers
iptables        iptables                         containers
busybox-static  static:busybox                   containers
libc-bin        ldconfig                         containers
strace          strace                           containers
util-linux      unshare                          containers
binutils        readelf                          containers
musl-tools      musl-gcc                         containers
'

exec 3>&1 # where progress is told while a step's output goes to its log

say() { printf '%s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# The log of a step is shown only when the step fails.
quietly() {
    local log
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || { cat "$log" >&2; rm -f "$log"; fail "this failed: $*"; }
    rm -f "$log"
}

# sbin folders are not in an ordinary user's PATH.
present() {
    case $1 in
        /*) compgen -G "$1" >/dev/null ;;
        static:*) present "${1#static:}" && ! ldd "$(command -v "${1#static:}")" >/dev/null 2>&1 ;;
        *) PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null ;;
    esac
}

install_packages() {
    local policy=/usr/sbin/policy-rc.d package
    if [ ! -e "$policy" ]; then
        # Debian starts a daemon as soon as its package is there unless this file forbids it; the tests start their own.
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    for package in "$@"; do say "installing $package (Debian package)"; done
    export DEBIAN_FRONTEND=noninteractive
    quietly apt-get -q update
    quietly apt-get -q install --yes --no-install-recommends "$@"
}

# pip takes a minute or more the first time: a line for each package shows that it goes on.
install_into_venv() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --editable '.[dev]' |
        tee >(sed -un 's/^Collecting \([A-Za-z0-9._-]*\).*/  fetching \1/p; s/^Installing collected.*/  installing them/p' >&3)
}

missing_always=() missing_containers=()
while read -r package proof need; do
    [ -n "$package" ] || continue
    present "$proof" && continue
    if [ "$need" = always ]; then missing_always+=("$package"); else missing_containers+=("$package"); fi
done <<<"$needs"
missing=("${missing_always[@]}" "${missing_containers[@]}")

if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && present apt-get; then
        install_packages "${missing[@]}"
    elif [ ${#missing_always[@]} -gt 0 ]; then
        fail "missing: ${missing_always[*]}; as root: apt-get install --no-install-recommends ${missing[*]}"
    else
        say "not here, so the tests that need them are skipped: ${missing_containers[*]} (as root, make setup installs them)"
    fi
fi

# The environment belongs to one interpreter, one list of dependencies and one place on disk.
stamp="$(/usr/bin/python3 -V) $(sha256sum <pyproject.toml) $PWD"
if [ "$(cat .venv/.setup 2>/dev/null)" != "$stamp" ]; then
    /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "/usr/bin/python3 is older than Python 3.10"
    if ! .venv/bin/python -c pass 2>/dev/null; then
        say "making the virtual environment .venv (from /usr/bin/python3)"
        quietly /usr/bin/python3 -m venv --clear .venv
    fi
    say "installing nvct and its tools into .venv (Python packages of pyproject.toml)"
    quietly install_into_venv
    printf '%s\n' "$stamp" >.venv/.setup
fi
