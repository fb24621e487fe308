# What a run leaves in $OUT, as functions that run.sh sources: record.json, table.txt, run.log, results.tar.gz.
#
# Each file is written beside its place and renamed, so a run that is killed at any moment leaves whole files. The order is
# archive, table, record: a stage that record.json names has its files in results.tar.gz. $OUT/now/STAGE holds the files of
# the stage that runs. The table is also what a later call reads to know which stages have run.
# shellcheck shell=bash

names=() statuses=() seconds=() limits=() starts=()
worst=0

say() { printf '%s\n' "$@" | tee -a "$OUT/run.log"; }

# Text that becomes FILE in one step.
replace() {
    cat >"$OUT/now/.new" && mv -f "$OUT/now/.new" "$1"
}

# What the GPU says of itself, as the members of a JSON object.
gpu_facts() {
    local query=name,driver_version,compute_cap,memory.total,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw
    local value k=0 keys=(${query//,/ })
    timeout 5 nvidia-smi --id=0 --query-gpu=$query --format=csv,noheader 2>/dev/null | sed 's/["\\]/\\&/g; s/, /\n/g' |
        while read -r value; do
            printf '%s"%s": "%s"' "$([ $k -gt 0 ] && echo ', ')" "${keys[k]}" "$value"
            k=$((k + 1))
        done
}

verdict() {
    case $1 in
        0) echo passed ;;
        "$ABSENT") echo "FAILED: absent, or nothing ran" ;;
        124 | 137) echo "FAILED: did not end within $2 s" ;;
        *) echo FAILED ;;
    esac
}

write_table() {
    local k
    {
        printf '# commit %s\n%-12s %6s %8s %6s  %-21s %s\n' "$commit" stage exit seconds limit started verdict
        for k in "${!names[@]}"; do
            printf '%-12s %6d %8d %6d  %-21s %s\n' "${names[k]}" "${statuses[k]}" "${seconds[k]}" "${limits[k]}" \
                "${starts[k]}" "$(verdict "${statuses[k]}" "${limits[k]}")"
        done
    } | replace "$OUT/table.txt"
}

write_record() {
    local k
    {
        printf '{\n  "commit": "%s",\n  "started": "%s",\n  "seconds": %d,\n' "$commit" "$started" "$SECONDS"
        printf '  "gpu_before": {%s},\n  "gpu_now": {%s},\n' "$facts_before" "$(gpu_facts)"
        printf '  "nccl": "%s",\n  "worst": %d,\n  "stages": [' "$nccl_from" "$worst"
        for k in "${!names[@]}"; do
            printf '%s\n    {"name": "%s", "exit": %d, "seconds": %d, "limit_seconds": %d, "started": "%s"}' \
                "$([ "$k" -gt 0 ] && echo ,)" "${names[k]}" "${statuses[k]}" "${seconds[k]}" "${limits[k]}" "${starts[k]}"
        done
        printf '\n  ]\n}\n'
    } | replace "$OUT/record.json"
}

# FOLDER...: moves these folders of now/ into the archive.
archive() {
    local now=$OUT/now
    rm -f "$now/.tar"
    if [ -e "$OUT/results.tar.gz" ]; then
        gzip -dc "$OUT/results.tar.gz" >"$now/.tar" || return 1
    fi
    tar -C "$now" -rf "$now/.tar" "$@" && gzip -c "$now/.tar" | replace "$OUT/results.tar.gz"
    rm -f "$now/.tar"
    (cd "$now" && rm -rf "$@")
}

# NAME: what run.log has of the latest run of a stage. It is no file of its own meanwhile, because some machines return few.
log_of() {
    awk -v start="== $1 (at " 'index($0, start) == 1 { text = "" } { text = text $0 "\n" } END { printf "%s", text }' "$OUT/run.log"
}

# NAME STATUS SECONDS LIMIT START: a stage has ended.
finish() {
    log_of "$1" >"$OUT/now/$1/log"
    archive "$1"
    names+=("$1") statuses+=("$2") seconds+=("$3") limits+=("$4") starts+=("$5")
    [ "$2" -le "$worst" ] || worst=$2
    write_table
    write_record
}

has_run() {
    local name
    for name in "${names[@]}"; do
        [ "$name" != "$1" ] || return 0
    done
    return 1
}

# Reads what earlier calls have left in $OUT. Files of a stage that was cut off go into the archive as STAGE.cut-N.
resume() {
    local name exit_status took limit start rest folder k
    mkdir -p "$OUT/now"
    if [ -e "$OUT/table.txt" ]; then
        if ! grep -qxF "# commit $commit" "$OUT/table.txt"; then
            echo "run.sh: $OUT holds results of another commit; name another folder as OUT" >&2
            exit 2
        fi
        while read -r name exit_status took limit start rest; do
            names+=("$name") statuses+=("$exit_status") seconds+=("$took") limits+=("$limit") starts+=("$start")
            [ "$exit_status" -le "$worst" ] || worst=$exit_status
        done < <(tail -n +3 "$OUT/table.txt")
    fi
    rm -f "$OUT/now/".[!.]*
    for folder in "$OUT/now/"*/; do
        [ -d "$folder" ] || continue
        name=$(basename "$folder")
        if has_run "$name"; then
            rm -rf "$folder" # in the archive already
            continue
        fi
        k=1
        while gzip -dc "$OUT/results.tar.gz" 2>/dev/null | tar -tf - 2>/dev/null | grep -q "^$name.cut-$k/"; do k=$((k + 1)); done
        log_of "$name" >"$folder/log"
        mv "$folder" "$OUT/now/$name.cut-$k"
        archive "$name.cut-$k"
    done
}
