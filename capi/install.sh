#!/usr/bin/env bash
# Installs the C library: header, shared and static library, pkg-config file. For cargo-c there is [package.metadata.capi].
#
# capi/install.sh PREFIX [FOLDER]     FOLDER has the built libraries; unset, they are built in release first
set -euo pipefail
[ $# -ge 1 ] || { sed -n 's/^# \(capi.*\)/\1/p' "$0" >&2; exit 2; }
mkdir -p "$1/include" "$1/lib/pkgconfig"
prefix=$(realpath "$1")
folder=${2:+$(realpath "$2")}
cd "$(dirname "$0")"
if [ -z "$folder" ]; then
    cargo build --release -p instep-capi
    folder=${CARGO_TARGET_DIR:-../target}/release
fi
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' ../Cargo.toml)
install -m 644 include/instep.h "$prefix/include/"
install -m 644 "$folder/libinstep.a" "$prefix/lib/"
install -m 755 "$folder/libinstep.so" "$prefix/lib/libinstep.so.$version"
ln -sf "libinstep.so.$version" "$prefix/lib/libinstep.so.${version%.*}"
ln -sf "libinstep.so.${version%.*}" "$prefix/lib/libinstep.so"
sed "s|@prefix@|$prefix|; s|@version@|$version|" instep.pc.in >"$prefix/lib/pkgconfig/instep.pc"
