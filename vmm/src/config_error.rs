//! What is wrong with a configuration.

use std::fmt;

/// A configuration that cannot be run, in one line: the option and its value, what is wrong, and what to do.
///
/// It prints as `--net id=pf0,num_queues=3: queues come in pairs; give an even number, 2 or more`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The option and its value, as on the command line: `--net id=pf0,num_queues=3`.
    pub subject: String,
    /// What is wrong with it, and the way out.
    pub problem: Problem,
}

impl ConfigError {
    pub(crate) fn new(subject: impl Into<String>, problem: Problem) -> Self {
        Self { subject: subject.into(), problem }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A value may come from JSON and hold anything; the report stays one line that a terminal can show.
        let line = format!("{}: {}", self.subject, self.problem);
        line.chars()
            .try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { write!(f, "{c}") })
    }
}

impl std::error::Error for ConfigError {}

/// What is wrong with an option's value, and the way out.
///
/// The kinds are what a program would tell apart; the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is not of the option's grammar: an unknown key, a missing `=`, a bracket that is not closed, a value that is no
    /// number, a key without which the option means nothing. Only reading a text gives this, never [`crate::config::VmConfig::plan`].
    #[error("{0}")]
    Syntax(String),
    /// The value is of the right form, and not one that the key can have.
    #[error("{0}")]
    Value(String),
    /// Something that has to be given is not.
    #[error("{0}")]
    Missing(String),
    /// Two values that exclude or require each other.
    #[error("{0}")]
    Conflict(String),
    /// A name, an address or a slot that only one device can have is given to two.
    #[error("{what} is in use by {user} already; {remedy}")]
    InUse {
        /// What is used twice: `MAC address 52:54:00:00:00:01`.
        what: String,
        /// Who has it: `pf0` or `VF 3 of pf0`.
        user: String,
        /// What to do.
        remedy: String,
    },
    /// The VM asks for more than the machine has: slots, buses, CPUs.
    #[error("{0}")]
    Limit(String),
    /// Cloud Hypervisor has this; this version has not.
    #[error("{what} not in this version yet; {remedy}")]
    NotYet {
        /// What is not there, with its verb: `vhost-user backends are`.
        what: String,
        /// What to do instead.
        remedy: String,
    },
    /// The host did not give what the plan needs.
    #[error("{0}")]
    Host(String),
}
