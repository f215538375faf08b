#!/bin/sh
# Print the first Python that can create the course's environment; if none can, print python3, and
# setup_venv.py says what it lacks.
for python in "$1" python3 python3.14 python3.13 python3.12 python3.11; do
  if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    command -v "$python" && exit
  fi
done
# If the machine has no such Python, uv can install one.
command -v uv >/dev/null && uv python install 3.13 >&2 && uv python find --system 3.13 && exit
command -v python3 && exit
echo "setup: no Python found; install version 3.11 or newer, or uv, which installs one" >&2
exit 1
