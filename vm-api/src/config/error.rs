//! Faults of a configuration.

use std::borrow::Cow;
use std::fmt;

/// An invalid configuration, in one line: the option and its value, the fault, and the remedy.
///
/// It prints as `--net id=pf0,num_queues=1: a NIC has one pair of queues or more; give 2 or more`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The option and its value, as on the command line: `--net id=pf0,num_queues=1`.
    pub subject: String,
    /// Fault, and remedy.
    pub problem: Problem,
}

impl ConfigError {
    /// An error about `subject`.
    pub fn new(subject: impl Into<String>, problem: Problem) -> Self {
        Self { subject: subject.into(), problem }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_line(f, &format!("{}: {}", shortened(&self.subject, LONGEST_SUBJECT), self.problem))
    }
}

impl std::error::Error for ConfigError {}

/// Writes a report on one line that a terminal can show, whatever values it contains.
pub(crate) fn write_line(f: &mut fmt::Formatter<'_>, report: &str) -> fmt::Result {
    report.chars().try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { write!(f, "{c}") })
}

/// The most characters of an option and its value in a report.
const LONGEST_SUBJECT: usize = 500;

/// The first `most` characters of `text`, and a mark if there are more.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()).into(),
        None => text.into(),
    }
}

/// Fault of an option's value, and its remedy.
///
/// The kinds are for programs, the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text does not match the option's grammar: an unknown key, a missing `=`, an unclosed bracket, a value that
    /// is not a number, a missing key that the option requires. Only parsing returns this, never planning.
    #[error("{0}")]
    Syntax(String),
    /// The value is well formed, but not allowed for the key.
    #[error("{0}")]
    Value(String),
    /// Something required is missing.
    #[error("{0}")]
    Missing(String),
    /// Two values that exclude or require each other.
    #[error("{0}")]
    Conflict(String),
    /// Two devices have the same name, address or slot.
    #[error("{what} is already in use by {user}; {remedy}")]
    InUse {
        /// Name used twice: `MAC address 52:54:00:00:00:01`.
        what: String,
        /// Function or device with that name: `pf0` or `VF 3 of pf0`.
        user: String,
        /// Remedy.
        remedy: String,
    },
    /// The VM needs more than the machine has: slots, buses, CPUs.
    #[error("{0}")]
    Limit(String),
    /// Cloud Hypervisor supports this, and this version does not yet.
    #[error("{what} not supported yet; {remedy}")]
    NotYet {
        /// The missing feature, with its verb: `vhost-user backends are`.
        what: String,
        /// Alternative.
        remedy: String,
    },
    /// The host failed to provide what the plan needs.
    #[error("{0}")]
    Host(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_short_whatever_the_value_is() {
        let id = "\u{1F980}".repeat(1 << 20);
        let problem = crate::config::id::check_id(&id).unwrap_err();
        let error = ConfigError::new(format!("--net id={id}"), problem).to_string();
        let (subject, what) = error.split_once("...: ").unwrap();
        assert_eq!(subject.chars().count(), LONGEST_SUBJECT);
        assert_eq!(what, "a name of 1048576 characters; give at most 255");
        assert_eq!(shortened("abc", 3), "abc");
    }
}
