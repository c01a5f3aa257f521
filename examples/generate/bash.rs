//! Completion for bash: subcommands, options, words and keys of their values, and files.

use std::fmt::Write as _;

use clap::{Arg, Command};

/// The part that is the same for all commands. `NAME` is the command's, with underscores.
///
/// bash splits words at `=` and `:`, and replaces only what follows the last of them, so the line is read here.
const COMMON: &str = r#"
_NAME() {
    local line=${COMP_LINE:0:COMP_POINT} command="" option="" spec="" word words cur part i
    read -ra words <<<"$line"
    [[ -z $line || $line == *[[:space:]] ]] && words+=("")
    cur=${words[-1]}
    COMPREPLY=()
    for ((i = 1; i < ${#words[@]} - 1; i++)); do
        word=${words[i]}
        if [[ $word == -* ]]; then
            option=${word%%=*}
            spec=$(_NAME_spec "$command" "$option")
            [[ $word == *=* || -z $spec || $spec == flag ]] && option=""
        elif [[ -n $option ]]; then
            [[ $spec == +* ]] || option=""
        elif [[ -z $command && " $(_NAME_commands) " == *" $word "* ]]; then
            command=$word
        fi
    done
    spec=""
    if [[ -n $option ]]; then
        spec=$(_NAME_spec "$command" "$option")
    elif [[ $cur == -*=* ]]; then
        spec=$(_NAME_spec "$command" "${cur%%=*}")
        cur=${cur#*=}
    elif [[ $cur != -* ]]; then
        spec=$(_NAME_spec "$command" "")
    fi
    if [[ -n $option && $cur == -* ]] || [[ $cur == -* && $cur != -*=* && -z $spec ]]; then
        COMPREPLY=($(compgen -W "$(_NAME_options "$command")" -- "$cur"))
        return
    fi
    spec=${spec#+}
    case $spec in
        words:*) COMPREPLY=($(compgen -W "${spec#words:}" -- "$cur")) ;;
        keys:*) _NAME_keys "${spec#keys:}" ;;
        files) COMPREPLY=($(compgen -f -- "$cur")) ;;
        *) [[ -z $command ]] && COMPREPLY=($(compgen -W "$(_NAME_commands)" -- "$cur")) ;;
    esac
}

# Completes a key, or the value of one, at the end of $cur.
_NAME_keys() {
    local before="" part=$cur key value known
    # What is behind the last comma, outside of brackets.
    [[ $cur == *,* ]] && { before=${cur%,*},; part=${cur##*,}; }
    # bash has the text behind the last equals sign as its word.
    [[ $COMP_WORDBREAKS == *=* ]] && before=${before##*=}
    if [[ $part != *=* ]]; then
        for known in $1; do
            key=${known%%=*}
            [[ $key == "$part"* && ,$cur != *",$key="* ]] && COMPREPLY+=("$before$key=")
        done
        compopt -o nospace 2>/dev/null
        return
    fi
    key=${part%%=*} value=${part#*=}
    [[ $COMP_WORDBREAKS == *=* ]] && before="" || before=${cur%"$value"}
    for known in $1; do
        [[ ${known%%=*} == "$key" ]] || continue
        case ${known#*=} in
            '<path>') COMPREPLY=($(compgen -P "$before" -f -- "$value")) ;;
            *['<[']*) ;;
            *) known=${known#*=}; COMPREPLY=($(compgen -P "$before" -W "${known//|/ }" -- "$value")) ;;
        esac
    done
    compopt -o nospace 2>/dev/null
}

complete -F _NAME COMMAND
"#;

/// The script for `command`, which has been built.
pub(crate) fn script(command: &Command) -> String {
    let name = command.get_name().replace('-', "_");
    let commands: Vec<_> = subcommands(command).map(Command::get_name).collect();
    let mut text = format!("# Completion of {} for bash.\n\n", command.get_name());
    // Writing to a string cannot fail, here and below.
    let _ = write!(text, "_{name}_commands() {{\n    echo '{}'\n}}\n\n", commands.join(" "));
    let _ = write!(text, "# The options of a subcommand.\n_{name}_options() {{\n    case $1 in\n");
    for command in all(command) {
        let options: Vec<_> = command.get_arguments().filter(|arg| !arg.is_hide_set()).flat_map(names).collect();
        let _ = writeln!(text, "        '{}') echo '{}' ;;", key(command, &name), options.join(" "));
    }
    let _ = write!(text, "    esac\n}}\n\n# The form of an option's value, or of an argument without a name.\n");
    let _ = write!(text, "_{name}_spec() {{\n    case \"$1 $2\" in\n");
    for command in all(command) {
        let mut has_positional = false;
        for argument in command.get_arguments() {
            let Some(spec) = spec(argument) else { continue };
            let mut given = names(argument);
            if argument.is_positional() {
                // Only the first one: those after it are numbers.
                if std::mem::replace(&mut has_positional, true) {
                    continue;
                }
                given.push(String::new());
            }
            let patterns: Vec<_> = given.iter().map(|given| format!("'{} {given}'", key(command, &name))).collect();
            let _ = writeln!(text, "        {}) echo '{spec}' ;;", patterns.join("|"));
        }
    }
    text + "    esac\n}\n" + &COMMON.replace("NAME", &name).replace("COMMAND", command.get_name())
}

fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

/// The command and its subcommands.
fn all(command: &Command) -> impl Iterator<Item = &Command> {
    std::iter::once(command).chain(subcommands(command))
}

/// Name of a subcommand; empty for the command itself.
fn key<'c>(command: &'c Command, name: &str) -> &'c str {
    if command.get_name().replace('-', "_") == name { "" } else { command.get_name() }
}

/// The names of an option.
fn names(argument: &Arg) -> Vec<String> {
    let (long, short) = (argument.get_long().map(|long| format!("--{long}")), argument.get_short());
    long.into_iter().chain(short.map(|short| format!("-{short}"))).collect()
}

/// The form of the value: a `+` if there may be several, and what it is; `None` if nothing can be completed.
fn spec(argument: &Arg) -> Option<String> {
    if !argument.is_positional() && !argument.get_action().takes_values() {
        return Some("flag".to_string());
    }
    let more = if argument.get_num_args().is_some_and(|count| count.max_values() > 1) { "+" } else { "" };
    let words: Vec<_> = argument.get_possible_values().iter().map(|word| word.get_name().to_string()).collect();
    let keys = keys(argument);
    let value = argument.get_value_names().and_then(<[_]>::first).map_or("", |name| name.as_str());
    let form = match (words.is_empty(), keys.is_empty()) {
        (false, _) => format!("words:{}", words.join(" ")),
        (_, false) => format!("keys:{}", keys.join(" ")),
        _ if ["path", "FILE", "file"].contains(&value) || value.starts_with("path=") => "files".to_string(),
        _ => "text".to_string(),
    };
    Some(format!("{more}{form}"))
}

/// The keys of a value, each with its form, which the help has at the start of lines.
fn keys(argument: &Arg) -> Vec<String> {
    let help = argument.get_long_help().map(ToString::to_string).unwrap_or_default();
    let is_key = |line: &&str| line.split_once('=').is_some_and(|(key, _)| super::is_key(key));
    // A quotation mark would end the text in the script, and a blank a key.
    help.lines().filter(is_key).map(|line| line.replace(['\'', ' '], "")).collect()
}
