#!/bin/sh
# Kernel, QEMU and the guest's tools from Debian's packages, by the ordinary `apt-get` with a state of its own: nothing
# is installed, and the machine's own package state is neither read nor written. What is in the cache is not fetched
# again, and each use compares it with the pins: a run on another kernel or another emulator would count other
# instructions and have other faults, so that they change by a commit and no other way.
#
#   CACHE/apt/…       lists, sources and settings of apt
#   CACHE/debs/…      the pinned packages
#   CACHE/kernel/…    those of the kernel, unpacked: usr/lib/modules/RELEASE/vmlinuz, modules.dep, kernel/…
#   CACHE/qemu/…      qemu-system-x86 and everything that it needs, its C library and loader too
#   CACHE/tools/…     busybox, dash, iproute2, ethtool, likewise
#   CACHE/PART.seal   what a part was unpacked from, and the digest of all that lies there
#
# Usage: packages.sh CACHE LOCK SOURCES PART… | --refresh. Exit code 3: the packages cannot be had here; why, with the
# remedy, is the one line on standard output. So is any other error (exit code 1).
set -eu
cache=$1 lock=$2 sources=$3
shift 3
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

unavailable() {
    echo "$1; $2"
    exit 3
}

wrong() {
    echo "$1"
    exit 1
}

say() {
    echo "$1" >&2
}

apt() {
    command -v apt-get >/dev/null ||
        unavailable "the command \`apt-get\` is missing, which fetches Debian's packages" "install it"
    LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -c "$cache/apt/apt.conf" "$@" 2>"$new/said" >"$new/out" || {
        # The line that says most: the first error, else the first warning, else the last one.
        message=$(sed -n 's/^E: //p' "$new/said" | head -n 1)
        [ -n "$message" ] || message=$(sed -n 's/^W: //p' "$new/said" | head -n 1)
        [ -n "$message" ] || message=$(sed '/^[[:space:]]*$/d' "$new/said" | tail -n 1)
        case ${message:=no message} in
        *NO_PUBKEY* | *"not signed"* | *"signatures couldn't be verified"*)
            unavailable "Debian's keys here are too old ($message)" "upgrade debian-archive-keyring"
            ;;
        *"Unable to locate package"* | *"Can't find a source to download version"* | \
            *"has no installation candidate"* | *"was not found"*)
            unavailable "Debian's mirror has no such thing (any more): $message" \
                "pin what it has now (cargo xtask vm --refresh) and commit packages.lock"
            ;;
        *)
            unavailable "cannot fetch Debian's packages ($message)" "check the network or apt's proxy"
            ;;
        esac
    }
}

# Gives apt the lists that the mirror has now.
lists() {
    case $sources in
    *"$keyring"*)
        [ -e "$keyring" ] || unavailable "Debian's keys are missing ($keyring)" "install debian-archive-keyring"
        ;;
    esac
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial" "$cache/apt/state"
    # Read after the machine's own settings, of which proxies are worth keeping and commands that follow an update are
    # not.
    cat >"$cache/apt/apt.conf" <<END
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Post-Invoke;
#clear APT::Architectures;
Dir::State "$cache/apt/state";
Dir::State::lists "$cache/apt/lists";
Dir::State::status "$cache/apt/status";
Dir::State::extended_states "$cache/apt/state/extended_states";
Dir::Cache "$cache/apt";
Dir::Cache::archives "$cache/apt/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Dir::Etc::sourcelist "$cache/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::http::Timeout "30";
Debug::NoLocking "true";
END
    echo "$sources" >"$cache/apt/sources.list"
    # Nothing is installed here, so that whatever a package needs is fetched as well.
    : >"$cache/apt/status"
    say "fetching Debian's package lists"
    apt update
}

# Every package in $new/pins (FILE SHA256 a line) is there, and is what is pinned: fetched where it was not.
fetch() {
    missing=$(cd "$cache/debs" && awk '{ print $2 "  " $1 }' "$new/pins" |
        LC_ALL=C sha256sum --check 2>/dev/null | sed -n 's/: FAILED.*//p')
    [ -n "$missing" ] || return 0
    say "fetching packages of the $1, which are missing or not what is pinned: $(echo $missing)"
    lists
    # `apt-get download` takes NAME=VERSION for NAME_VERSION_ARCHITECTURE.deb, with a colon for `%3a`.
    asked=$(echo "$missing" | sed 's/%3a/:/; s/_\([^_]*\)_[^_]*$/=\1/')
    mkdir "$new/download"
    cd "$new/download"
    apt download $asked
    for file in $missing; do
        sha256=$(awk -v file="$file" '$1 == file { print $2 }' "$new/pins")
        echo "$sha256  $file" | sha256sum --check --status ||
            wrong "the mirror's $file has another SHA-256 than is pinned; see what changed it, pin it anew: --refresh"
        mv "$file" "$cache/debs/$file"
    done
    cd "$cache"
    rm -r "$new/download"
}

# What a part is unpacked from, and what lies there.
seal() {
    grep "^$1 " "$lock"
    tar -C "$cache/$1" -cf - . | sha256sum
}

# A part's packages, unpacked in its folder, which appears whole or not at all.
unpack() {
    grep "^$1 " "$lock" | cut -d ' ' -f 2- >"$new/pins"
    [ -s "$new/pins" ] || wrong "$lock pins nothing for $1"
    fetch "$1"
    if [ -d "$cache/$1" ] && [ -e "$cache/$1.seal" ]; then
        [ "$(cat "$cache/$1.seal")" != "$(seal "$1")" ] || return 0
        say "$cache/$1 is not what was unpacked there, or of other packages: unpacking it anew"
    fi
    command -v dpkg-deb >/dev/null ||
        unavailable "the command \`dpkg-deb\` is missing, which unpacks Debian's packages" "install it"
    say "unpacking the packages of the $1"
    mkdir "$new/tree"
    while read -r file _; do
        dpkg-deb -x "$cache/debs/$file" "$new/tree" 2>"$new/said" && continue
        ! grep -q "No space left on device" "$new/said" ||
            unavailable "the disk has no room for Debian's packages in $cache" \
                "free 1 GiB there, or name another folder (LM_VM_CACHE)"
        wrong "cannot unpack $file: $(tail -n 1 "$new/said")"
    done <"$new/pins"
    # Debian makes modules.dep when it installs a kernel, and nothing is installed here.
    [ "$1" != kernel ] || for release in "$new/tree/usr/lib/modules"/*; do
        "$cache/tools/usr/bin/busybox" depmod -b "$new/tree/usr" "${release##*/}"
    done
    rm -rf "${cache:?}/$1"
    mv "$new/tree" "$cache/$1"
    seal "$1" >"$cache/$1.seal"
}

# Pins what the mirror has now for a part. Of the kernel's packages those of its release, and not what it needs when it
# is installed.
pin() {
    part=$1
    shift
    apt install --no-install-recommends --print-uris -qq -o Acquire::ForceHash=SHA256 "$@"
    pins=$(awk -v part="$part" '
        /^\047/ && $2 ~ /^[^_]*_[^_]*_[^_]*\.deb$/ && sub(/^SHA256:/, "", $4) &&
            (part != "kernel" || $2 ~ /^linux-(image|binary|modules)-[0-9]/) { print part, $2, $4 }' "$new/out")
    [ -n "$pins" ] || unavailable "Debian's mirror has no package of the $part ($*)" "try another day"
    echo "$pins" >>"$new/pinned"
}

mkdir -p "$cache/debs" 2>/dev/null || wrong "cannot use the folder $cache; name another in LM_VM_CACHE"
# Two runs at once would write the same files.
exec 9>"$cache/lock"
flock 9
new=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
if [ "$1" = --refresh ]; then
    lists
    pin kernel -t trixie-backports linux-image-amd64
    pin qemu qemu-system-x86
    pin tools busybox-static dash iproute2 ethtool
    { grep '^#' "$lock" && LC_ALL=C sort "$new/pinned"; } >"$new/lock"
    cp "$new/lock" "$lock"
    say "the newest packages are pinned in $lock: commit it"
else
    for part in "$@"; do
        unpack "$part"
    done
fi
