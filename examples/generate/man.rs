//! Mends pages of clap_mangen: keys of options become lists, and the synopsis has values.

use clap::Command;

/// The page of a command that clap_mangen made as `page`.
pub(crate) fn mended(page: &str, command: &Command) -> String {
    let mut lines = Vec::new();
    let mut is_list = false;
    let mut is_synopsis = false;
    for line in page.lines() {
        if is_synopsis && line.starts_with(".SH") {
            is_synopsis = false;
        } else if is_synopsis {
            continue;
        }
        match key(line) {
            Some((key, form)) => {
                // A list within the paragraph of its option.
                if !std::mem::replace(&mut is_list, true) {
                    lines.push(".RS".to_string());
                }
                lines.extend([".TP".to_string(), format!("\\fB{key}\\fR={form}")]);
                continue;
            }
            // The text of a key is indented in the help.
            None if is_list && line.starts_with("        ") => lines.push(line.trim_start().to_string()),
            None => {
                if std::mem::take(&mut is_list) {
                    lines.push(".RE".to_string());
                }
                lines.push(line.to_string());
            }
        }
        if line == ".SH SYNOPSIS" {
            is_synopsis = true;
            // Options are long, and lines end where they may.
            lines.extend([".ad l".to_string(), synopsis(command), ".ad b".to_string()]);
        }
    }
    if is_list {
        lines.push(".RE".to_string());
    }
    lines.join("\n") + "\n"
}

/// The key that a line begins with, and the form of its value.
fn key(line: &str) -> Option<(&str, &str)> {
    line.split_once('=').filter(|(key, _)| super::is_key(key))
}

fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut text = format!("\\fB{}\\fR", escaped(name));
    for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
        let name = argument.get_long().map(|long| format!("--{long}"));
        let name = name.or_else(|| argument.get_short().map(|short| format!("-{short}")));
        let values = argument.get_value_names().filter(|_| argument.get_action().takes_values());
        let value = values.and_then(<[_]>::first).map(|value| format!("\\fI{}\\fR", escaped(value)));
        let parts = [name.map(|name| format!("\\fB{}\\fR", escaped(&name))), value];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        let part = parts.join(" ");
        text += &if argument.is_required_set() { format!("\n{part}") } else { format!("\n[{part}]") };
    }
    if command.has_subcommands() {
        text += "\n<\\fIsubcommand\\fR>";
    }
    text
}

/// A word as roff shows it.
fn escaped(word: &str) -> String {
    word.replace('\\', "\\e").replace('-', "\\-")
}
