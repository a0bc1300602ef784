#!/bin/sh
# QEMU from Debian's packages, unpacked in ROOT, by the loader and the libraries there.
#
# Usage: qemu.sh ROOT OPTION…
set -eu
root=$1 libraries=$1/usr/lib/x86_64-linux-gnu
shift
loader=$root/usr/lib64/ld-linux-x86-64.so.2
[ -f "$loader" ] || loader=$root/lib64/ld-linux-x86-64.so.2
QEMU_MODULE_DIR=$libraries/qemu exec "$loader" --library-path "$libraries" "$root/usr/bin/qemu-system-x86_64" \
    -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
