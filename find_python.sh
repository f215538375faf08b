#!/bin/sh
# Prints a Python that can make the course's environment: the one that is named, or the first that
# will do. setup_venv.py says what the one that is printed lacks, if nothing better is found.
if [ -n "$1" ]; then
  command -v "$1" && exit
  echo "setup: there is no $1 here; name another Python, as in: make lab PYTHON=python3.13" >&2
  exit 1
fi
for python in python3 python3.14 python3.13 python3.12 python3.11 python3.15 python; do
  if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    command -v "$python"
    exit
  fi
done
if command -v uv >/dev/null; then
  # uv brings a Python along if the machine has none.
  uv python find --system '>=3.11' 2>/dev/null && exit
  uv python install 3.13 >&2 && uv python find --system 3.13 && exit
fi
command -v python3 && exit
echo "setup: there is no Python here; install version 3.11 or newer (on Debian and Ubuntu:" >&2
echo "apt-get install python3 python3-venv), or uv, which brings one, and run the same again" >&2
exit 1
