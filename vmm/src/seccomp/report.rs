//! Log message of a panic.

use std::io::Write;
use std::panic;

/// Makes panics report without opening a file. The standard library's report may have a backtrace, for which it opens
/// the program and its libraries; few threads may open files.
pub(super) fn without_files() {
    panic::set_hook(Box::new(|panic| {
        let name = rustix::thread::name().unwrap_or_default();
        // Standard error may be closed.
        let _ = writeln!(std::io::stderr(), "\nthread '{}' {panic}", name.to_string_lossy());
    }));
}
