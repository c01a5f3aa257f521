//! Errors, as one line for the person at the terminal.

use std::fmt;

/// An error of `cargo xtask`. Only people read it, so it is text and not an enum.
#[derive(Debug)]
pub(crate) struct Error(String);

/// The result of all functions in this crate.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with the text `message`.
    pub(crate) fn new(message: impl Into<String>) -> Error {
        Error(message.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds the failed action to an error.
pub(crate) trait Context<T> {
    /// Puts `what` in front of the error.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error(format!("{what}: {error}")))
    }
}
