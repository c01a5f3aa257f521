//! What went wrong, as one line for the person at the terminal.

use std::fmt;

/// A failure of the front door. Nobody handles it other than by reading it, so it is a sentence and not an enum.
#[derive(Debug)]
pub struct Error(String);

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failure that says `message`.
    pub fn new(message: impl Into<String>) -> Error {
        Error(message.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Says what was being done when a lower layer failed.
pub trait Context<T> {
    /// Puts `what` in front of the error.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error(format!("{what}: {error}")))
    }
}
