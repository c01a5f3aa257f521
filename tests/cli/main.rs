//! The command from a user's view: invalid input, its exit code, and the single line with the remedy.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here is a failed test")]

mod command;
mod files;
mod host;
mod keys;
mod options;
mod run;
