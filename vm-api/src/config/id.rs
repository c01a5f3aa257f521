//! Names of devices.

use std::collections::HashSet;

use crate::config::error::Problem;

/// The longest name, in characters.
pub const LONGEST: usize = 255;

/// Checks that a device can have this name.
///
/// # Errors
///
/// What is wrong with it.
pub fn check_id(id: &str) -> Result<(), Problem> {
    if id.is_empty() || id.starts_with("__") || id.chars().any(char::is_control) {
        let what = "not a device name; use printable characters, and do not start with two underscores".to_string();
        return Err(Problem::Value(what));
    }
    let length = id.chars().count();
    if length > LONGEST {
        let what = format!("a name of {length} characters; give at most {LONGEST}");
        return Err(Problem::Value(what));
    }
    Ok(())
}

/// The names of devices: those given, and `prefix` with the lowest free number for the others. Given names are not
/// checked.
pub fn numbered<'a>(prefix: &str, given: impl Iterator<Item = Option<&'a str>> + Clone) -> Vec<String> {
    let used: HashSet<_> = given.clone().flatten().collect();
    let mut free = (0u32..).map(|number| format!("{prefix}{number}")).filter(|id| !used.contains(id.as_str()));
    given.map(|id| id.map(str::to_string).or_else(|| free.next()).unwrap_or_default()).collect()
}
