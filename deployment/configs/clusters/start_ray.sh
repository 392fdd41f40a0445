#!/usr/bin/env bash
# Starts Ray on this machine without `ray up`, for a cluster whose machines you start by hand or by systemd:
#
#     deployment/configs/clusters/start_ray.sh head              on one machine
#     deployment/configs/clusters/start_ray.sh worker HEAD:6379  on each of the others
#
# The secret in ~/.ray/auth_token must be the same on all: `ray get-auth-token --generate` makes it on the head.
# Whoever reaches a Ray port and has it can run code; keep the ports inside a private network all the same.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }

ray="${RAY:-ray}"
export RAY_AUTH_MODE=token
umask 077
ulimit -n 65536 2>/dev/null || echo "open files: the limit stays at $(ulimit -n), 65536 is wished" >&2

case "${1:-}" in
  head)
    [ $# -eq 1 ] || usage
    exec "$ray" start --head --port=6379 --dashboard-host=127.0.0.1 --disable-usage-stats
    ;;
  worker)
    [ $# -eq 2 ] || usage
    exec "$ray" start --address="$2" --disable-usage-stats
    ;;
  *) usage ;;
esac
