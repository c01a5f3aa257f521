//! Names of devices.

use std::collections::HashSet;

use crate::config::error::Problem;

/// The longest name, in characters.
pub const LONGEST: usize = 255;

/// Checks that a device can have this name.
///
/// # Errors
///
/// Fails with the fault of the name.
pub fn check_id(id: &str) -> Result<(), Problem> {
    if id.is_empty() || id.starts_with("__") || id.chars().any(char::is_control) {
        let what = "not a device name; use printable characters, and do not start with two underscores".to_string();
        return Err(Problem::Value(what));
    }
    if id.chars().any(char::is_whitespace) {
        return Err(Problem::Value("a device name has no blanks; leave them out, or write - or _".to_string()));
    }
    let length = id.chars().count();
    if length > LONGEST {
        let what = format!("a name of {length} characters; give at most {LONGEST}");
        return Err(Problem::Value(what));
    }
    Ok(())
}

/// Chooses the ids of devices without one, kind by kind: the prefix of the kind, and a number that is unique among all
/// kinds. Given ids are not checked.
pub(super) fn choose(given: Vec<(&str, Vec<Option<&str>>)>) -> Vec<Vec<String>> {
    let number_of = |id: &str| given.iter().find_map(|(prefix, _)| id.strip_prefix(prefix))?.parse().ok();
    let used: HashSet<u32> = given.iter().flat_map(|(_, ids)| ids).flatten().filter_map(|id| number_of(id)).collect();
    let mut free = (0..).filter(|number| !used.contains(number));
    let of_kind = |(prefix, ids): &(&str, Vec<Option<&str>>)| {
        let mut numbered = || free.next().map(|number| format!("{prefix}{number}")).unwrap_or_default();
        ids.iter().map(|id| id.map_or_else(&mut numbered, str::to_string)).collect()
    };
    given.iter().map(of_kind).collect()
}

/// The name of VF `index` of the NIC `nic`.
pub fn vf_id(nic: &str, index: u16) -> String {
    format!("{nic}v{index}")
}
