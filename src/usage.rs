//! Errors of the command line, in one line.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The error of an invalid command line in one line; `None` if it requests help or the version. `given` are the
/// arguments of the command line.
pub(crate) fn line(error: &clap::Error, given: &[String]) -> Option<String> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return None;
        }
        ErrorKind::ArgumentConflict => {
            if let Some(line) = conflict(error, given) {
                return Some(line);
            }
        }
        ErrorKind::MissingRequiredArgument => {
            if let Some(line) = missing_group(error) {
                return Some(line);
            }
        }
        _ => {}
    }
    // clap's paragraphs: the error, an optional tip, and the usage, which --help shows better.
    let text = error.render().to_string();
    let text = text.split("\n\n").take_while(|paragraph| !paragraph.trim_start().starts_with("Usage:"));
    let paragraphs = text.map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let line = paragraphs.filter(|line| !line.starts_with("For more information")).collect::<Vec<_>>().join("; ");
    Some(format!("{}; see --help", line.trim_start_matches("error: ")))
}

/// The error of arguments that exclude each other. clap names all arguments of a group; this names the given ones.
fn conflict(error: &clap::Error, given: &[String]) -> Option<String> {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    let others = match error.get(ContextKind::PriorArg)? {
        ContextValue::String(other) => vec![other.clone()],
        ContextValue::Strings(others) => others.clone(),
        _ => return None,
    };
    let is_given = |name: &&str| given.iter().any(|given| given.split('=').next() == Some(*name));
    let others: Vec<_> = others.iter().map(|other| name(other)).filter(is_given).collect();
    if others.is_empty() || others.contains(&name(argument)) {
        return None;
    }
    Some(format!("{} cannot be combined with {}; leave one of them out; see --help", name(argument), others.join(", ")))
}

/// The error of a command of which at least one of many arguments is required. clap lists all of them.
fn missing_group(error: &clap::Error) -> Option<String> {
    let ContextValue::Strings(missing) = error.get(ContextKind::InvalidArg)? else { return None };
    let [group] = missing.as_slice() else { return None };
    let mut names = group.strip_prefix('<')?.strip_suffix('>')?.split('|').filter(|form| form.starts_with("--"));
    let (first, second, _) = (names.next()?, names.next()?, names.next()?);
    let ContextValue::StyledStr(usage) = error.get(ContextKind::Usage)? else { return None };
    let usage = usage.to_string();
    let words = usage.trim_start_matches("Usage: ").split_whitespace();
    let command = words.take_while(|word| !word.starts_with(['[', '<', '-'])).collect::<Vec<_>>().join(" ");
    Some(format!("at least one setting is required, such as {} or {}; see {command} --help", name(first), name(second)))
}

/// An argument without the form of its value.
fn name(argument: &str) -> &str {
    argument.split([' ', '=']).next().unwrap_or(argument)
}
