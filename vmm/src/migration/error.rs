//! Errors of creating the target's VM.

use crate::config::ConfigError;
use crate::error_kind::ErrorKind;
use crate::landlock::LandlockError;
use crate::machine_state::error::{RestoreError, Taken};

/// Failure to create the target's VM, in one line.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// The configuration is not valid on this host.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The program cannot be confined, or would leave its confinement.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
    /// The source's offer does not fit this host.
    #[error("{0}")]
    Unsuitable(String),
    /// The machine cannot be created.
    #[error("{0}")]
    Machine(String, ErrorKind),
}

impl MigrationError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(error) => (&error.problem).into(),
            Self::Landlock(error) => error.kind(),
            Self::Unsuitable(_) => ErrorKind::Invalid,
            Self::Machine(_, kind) => *kind,
        }
    }
}

impl From<RestoreError> for MigrationError {
    fn from(error: RestoreError) -> Self {
        Self::Machine(error.to_string(), error.kind())
    }
}

impl MigrationError {
    /// The error of a VM that cannot be created. With `is_local`, the source has passed its taps and sockets.
    pub(super) fn of(error: RestoreError, is_local: bool) -> Self {
        let kind = error.kind();
        match error {
            RestoreError::Taken { what, text, .. } if !is_local => {
                let fault = text.rsplit_once("; ").map_or(text.as_str(), |(fault, _)| fault);
                Self::Machine(format!("{fault}; {}", way_out(&what)), kind)
            }
            error => error.into(),
        }
    }
}

/// The way out of a receiver, which cannot name another tap or socket as a new VM can. The program that uses it is
/// probably the source, on the same host.
fn way_out(taken: &Taken) -> String {
    match taken {
        Taken::Tap(function) => format!(
            "if the source runs on this host, send with local=on, which passes its taps, or receive with \
             backends=[{function}@tap=<interface>]"
        ),
        Taken::BackendSocket(function) => format!("receive with backends=[{function}@socket=<path>]"),
        Taken::Socket => {
            "if the source runs on this host, send with local=on, which passes its sockets; otherwise stop that program"
                .to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_shown_a_way_that_its_request_has() {
        let text = |what, text: &str| {
            let kind = ErrorKind::Host;
            MigrationError::of(RestoreError::Taken { what, text: text.into(), kind }, false).to_string()
        };
        let tap = text(Taken::Tap("pf0/3".into()), "--net-vf pf=pf0,index=3: a is in use; name another tap");
        assert!(tap.starts_with("--net-vf pf=pf0,index=3: a is in use; if the source runs on this host"), "{tap}");
        assert!(tap.contains("local=on") && tap.contains("backends=[pf0/3@tap=<interface>]"), "{tap}");
        assert!(!tap.contains("name another tap"), "{tap}");
        let socket = text(Taken::Socket, "--serial socket=/s: another program is listening there; stop it");
        assert!(
            socket.starts_with("--serial socket=/s: another program is listening there; if the source"),
            "{socket}"
        );
        let backend = text(Taken::BackendSocket("a".into()), "--net id=a,socket=/s: used; stop it");
        assert!(backend.ends_with("used; receive with backends=[a@socket=<path>]"), "{backend}");
        // The source has passed its taps: this one is from the receiver's request.
        let error =
            RestoreError::Taken { what: Taken::Tap("a".into()), text: "a; another".into(), kind: ErrorKind::Host };
        assert_eq!(MigrationError::of(error, true).to_string(), "a; another");
    }
}
