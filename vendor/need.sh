#!/bin/sh
# need.sh [--install] GROUP... -- are the packages of these groups there? With --install, as root and with apt, installs
# what is missing; else names it in one line that can be pasted and ends with status 2. Where all is there it is silent.
# Groups: build comm test data lint.
install=0
[ "$1" = --install ] && { install=1; shift; }
missing=""
need() { # need PACKAGE TEST...: the package when the test fails
  package=$1; shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}
for group in "$@"; do
  case $group in
    build)
      need gcc command -v gcc
      need libc6-dev test -e /usr/include/stdlib.h
      need pkg-config command -v pkg-config
      need luajit command -v luajit
      need libluajit-5.1-dev test -e /usr/include/luajit-2.1/lua.h
      need libdnnl-dev sh -c 'test -e /usr/include/dnnl.h || test -e /usr/include/oneapi/dnnl/dnnl.h' ;;
    comm) # engines across hosts: each is built where its library is
      need g++ command -v g++
      need libgloo-dev test -e /usr/include/gloo/context.h
      need libopenmpi-dev pkg-config --exists ompi-c
      need openmpi-bin command -v mpirun.openmpi
      need libmpich-dev pkg-config --exists mpich
      need mpich command -v mpirun.mpich ;;
    test)
      need procps command -v pgrep
      need iproute2 command -v ip
      need python3 command -v python3 ;;
    data) # to unpack the CIFAR-10 images that some tests use
      need python3-pil /usr/bin/python3 -c 'import PIL' ;;
    lint)
      need clang-format command -v clang-format
      need clang-tidy command -v clang-tidy
      need lua-check command -v luacheck ;;
    *) echo "need.sh: no group $group" >&2; exit 2 ;;
  esac
done
[ -z "$missing" ] && exit 0
if [ $install = 1 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing:$missing" >&2
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null && exit 0
  echo "could not install:$missing" >&2
  exit 2
fi
echo "missing packages; install them with: sudo apt-get install -y$missing" >&2
exit 2
