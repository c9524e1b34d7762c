# shellcheck shell=bash disable=SC2034
# Hand pip's configuration to uv, which reads none of it: source this file, then call export_uv_settings.
# A variable of uv that the user has set is kept. Values go through variables, because a URL may contain a password
# and other users of a login node can read the arguments of a process.

# read_pip_settings PYTHON: fill the associative array pip_settings. Variables win over the section [install] of pip's
# files, and that section over [global]. The words of a value are separated by spaces.
read_pip_settings() {
    local listing section line value
    declare -gA pip_settings=()
    listing=$("$1" -m pip config list 2>/dev/null) || return 0
    for section in global install :env:; do
        while IFS= read -r line; do
            [[ $line == "$section".*=* ]] || continue
            line=${line#"$section."}
            value=${line#*=}
            value=${value:1:-1} # quoted as in Python
            pip_settings[${line%%=*}]=${value//'\n'/ }
        done <<<"$listing"
    done
}

# export_words NAME SETTING [SEPARATOR]: export uv's variable NAME with the words of pip's SETTING.
export_words() {
    local words
    read -ra words <<<"${pip_settings[$2]:-}"
    [[ -z ${!1:-} && ${#words[@]} -gt 0 ]] || return 0
    local IFS=${3:- }
    export "$1=${words[*]}"
}

# export_uv_settings PYTHON: export variables by which uv finds the packages that the pip of this Python finds. The array
# uv_options gets the settings that uv only accepts as options.
export_uv_settings() {
    read_pip_settings "$1"
    uv_options=()
    [[ ! ${pip_settings[no-index]:-} =~ ^(1|true|yes|on)$ ]] || uv_options=(--no-index)
    # pip compares the versions of all indexes; by default, uv stops at the first index that has the name
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    export_words UV_DEFAULT_INDEX index-url
    export_words UV_INDEX extra-index-url
    export_words UV_FIND_LINKS find-links ,
    export_words UV_CONSTRAINT constraint
    export_words UV_INSECURE_HOST trusted-host
    export_words UV_KEYRING_PROVIDER keyring-provider
    export_words UV_HTTP_TIMEOUT default-timeout
    export_words UV_HTTP_TIMEOUT timeout
    export_words UV_NO_CACHE no-cache-dir
    export_words SSL_CERT_FILE cert
    export_words SSL_CLIENT_CERT client-cert
    export_words HTTPS_PROXY proxy
    export_words HTTP_PROXY proxy
}
