//! The command as a user meets it: wrong input, its exit code, and the one line that says what to do.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here is a failed test")]

mod command;
mod files;
mod host;
mod keys;
mod options;
mod run;
