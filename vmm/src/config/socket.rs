//! The rules for paths of Unix sockets.

use std::path::Path;

use vm_api::config::error::{ConfigError, Problem};

use crate::config::subject::Subject;

/// The longest path of a Unix socket in bytes: `sun_path` of unix(7), less the zero at its end.
const LONGEST: usize = 107;

/// Checks the path of a backend's socket.
///
/// # Errors
///
/// Fails if no socket can have this path.
pub(crate) fn check(socket: &Path, subject: &Subject) -> Result<(), ConfigError> {
    let fail = |what| Err(ConfigError::new(subject.key("socket", socket.display()), Problem::Value(what)));
    match socket.as_os_str().len() {
        0 => fail("the path is empty; give the backend's socket".to_string()),
        len if len > LONGEST => {
            fail(format!("{len} bytes; the path of a Unix socket has at most {LONGEST}, shorten it"))
        }
        _ => Ok(()),
    }
}
