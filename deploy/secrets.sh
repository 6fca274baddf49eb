#!/bin/sh
# secrets.sh FOLDER: make a password for kvindexd's Redis user, and Valkey's ACL file with its digest.
# What is there already stays.
set -eu
folder=${1:?"usage: secrets.sh FOLDER"}
umask 077
mkdir -p "$folder"
[ -s "$folder/redis_password" ] || openssl rand -hex 32 >"$folder/redis_password"
digest=$(tr -d '\n' <"$folder/redis_password" | openssl dgst -sha256 -r | cut -d' ' -f1)
# `default` is off, and yet has every right: the server replays its append-only file as that user, and
# would leave out what the user may not do. `health` may ask whether the server is alive. The rights
# of kvindexd are those of docs/security.md.
cat >"$folder/users.acl" <<ACL
user default off resetpass ~* &* +@all
user health on nopass resetchannels resetkeys -@all +ping
user kvindexd on #$digest ~kvx:* +@connection -@dangerous +info +time +role +cluster|slots +memory|usage +eval +evalsha +exists +unlink +hset +hget +hmget +hgetall +hdel +hexists +hlen +hincrby +hscan +zadd +zrem +zrange +zscore +xadd +xread +xrevrange
ACL
# Both containers run as other users; who may enter the folder is the host's.
chmod 0444 "$folder/redis_password" "$folder/users.acl"
