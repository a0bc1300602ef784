#!/bin/sh
# What the guest runs: our own programs, as this machine builds them, Debian's `ip`, `tc`, `ethtool` and busybox, and
# the kernel modules whose files stand on standard input, one a line. All of it is put into the folder ROOT, as it shall
# lie in the guest, beside what is there already, and busybox packs that for the kernel: the same files make the same
# bytes.
#
# Usage: image.sh ROOT TOOLS PROGRAMS ARCHIVE TEST…: Debian's programs are in TOOLS, ours in PROGRAMS, the tests' go to
# /tests.
set -eu
root=$1 tools=$2 programs=$3 archive=$4
shift 4
libraries=usr/lib/x86_64-linux-gnu
# Where Debian's programs and their libraries lie in the guest: its /lib has this machine's, which ours are linked with.
debian=usr/lib/debian

loader() {
    for folder in usr/lib64 lib64; do
        [ ! -f "$1/$folder/ld-linux-x86-64.so.2" ] || echo "$1/$folder/ld-linux-x86-64.so.2"
    done | head -n 1
}

# The libraries of a program that is linked with those below a folder: lines of `NAME => PATH (ADDRESS)`. What has no
# path is the kernel's or the loader itself. A program that is linked statically has none.
needs() {
    "$(loader "$1")" --library-path "$1/$libraries" --list "$2" 2>/dev/null |
        sed -n 's/^[[:space:]]*[^/]* => \(.*\) (0x[0-9a-f]*)$/\1/p'
}

# A program of this machine, stripped of its line tables, which are most of it, and which the emulated machine would
# have to unpack.
ours() {
    needs "" "$2" | while read -r library; do
        cp -L "$library" "$root/$libraries"
    done
    strip --strip-debug -o "$root/$1/${2##*/}" "$2" 2>/dev/null || cp "$2" "$root/$1"
}

tool() {
    for folder in usr/bin usr/sbin bin sbin; do
        [ ! -f "$tools/$folder/$1" ] || echo "$tools/$folder/$1"
    done | head -n 1
}

# A program of Debian's under a path, started by Debian's loader with Debian's libraries, which may be newer than this
# machine's or older.
debians() {
    needs "$tools" "$(tool "$2")" | while read -r library; do
        cp -L "$library" "$root/$debian/lib"
    done
    cp -L "$(loader "$tools")" "$(tool "$2")" "$root/$debian"
    printf '#!/bin/busybox sh\nexec /%s/ld-linux-x86-64.so.2 --library-path /%s/lib /%s/%s "$@"\n' \
        "$debian" "$debian" "$debian" "$2" >"$root/$1"
    chmod 755 "$root/$1"
}

# Debian's layout: programs and libraries are below /usr, and iproute2 keeps its namespaces in /var/run.
for folder in proc sys dev run tmp root var tests bin lm/modules usr/sbin usr/lib64 "$libraries" "$debian/lib"; do
    mkdir -p "$root/$folder"
done
for link in sbin:usr/sbin lib:usr/lib lib64:usr/lib64 var/run:/run init:/bin/xtask; do
    ln -s "${link#*:}" "$root/${link%%:*}"
done
cp -L "$(loader "")" "$root/usr/lib64"
for program in lm-bench lm-check lm-recv lm-send xtask; do
    ours bin "$programs/$program"
done
for program in "$@"; do
    ours tests "$program"
done
cp "$(tool busybox)" "$root/bin"
# Not busybox's shell, which takes its own `ip` before the one on the path.
debians bin/sh dash
for program in ip tc ethtool; do
    debians "usr/sbin/$program" "$program"
done
while read -r module; do
    case $module in
    *.xz) "$root/bin/busybox" xzcat "$module" >"$root/lm/modules/${module##*/}" ;;
    *.zst) zstd -dcq "$module" >"$root/lm/modules/${module##*/}" ;;
    *) cp "$module" "$root/lm/modules" ;;
    esac
done
cd "$root"
find . -exec touch -hd @0 {} +
find . | LC_ALL=C sort | bin/busybox cpio -o -H newc -R 0:0 --ignore-devno --renumber-inodes -F "$archive"
