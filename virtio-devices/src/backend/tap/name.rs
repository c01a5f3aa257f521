//! Names of Linux network interfaces.

use thiserror::Error;

/// The longest name of an interface, in bytes (`IFNAMSIZ` less its NUL).
const LONGEST: usize = 15;

/// The reason why Linux does not accept an interface name, or does not take it literally.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum InterfaceNameError {
    /// The name is empty, or a directory's.
    #[error("not the name of an interface")]
    None,
    /// The name has too many bytes.
    #[error("{0} characters; the name of an interface has at most {LONGEST}, take a shorter one")]
    Length(usize),
    /// Linux refuses white space, `/` and `:`, and replaces `%` by a number.
    #[error("{0:?} cannot be part of the name of an interface; leave it out")]
    Character(char),
}

/// Checks that Linux accepts `name` for an interface.
///
/// # Errors
///
/// The reason why it does not.
pub fn check_interface_name(name: &str) -> Result<(), InterfaceNameError> {
    if name.is_empty() || name == "." || name == ".." {
        return Err(InterfaceNameError::None);
    }
    if name.len() > LONGEST {
        return Err(InterfaceNameError::Length(name.len()));
    }
    match name.chars().find(|c| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '%')) {
        Some(c) => Err(InterfaceNameError::Character(c)),
        None => Ok(()),
    }
}
