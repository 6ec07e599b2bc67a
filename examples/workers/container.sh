#!/bin/sh
# Plays an episode in a container: container.sh [OPTION OF docker run ...] IMAGE [ARGUMENT ...]
#
# `docker run` is a client only: when that is killed, its container runs on. This script ends the
# container when it is asked to end itself.
name="episode-$(uname -n)-$$-$(date +%s)"

end() {
    trap "" HUP INT TERM # once is enough, though a killed worker's threads all ask
    kill -KILL "$!" # a client that is gone starts nothing more
    wait
    docker rm --force "$name" >&2
    exit 143
}

trap end HUP INT TERM
exec 3<&0 # what runs in the background would have no input
docker run --init --rm --interactive --name "$name" --network host \
    --env OPENAI_BASE_URL --env OPENAI_API_KEY "$@" <&3 3<&- &
wait "$!"
