//! A run of the command that must fail cleanly.

use std::fs;
use std::process::Command as StdCommand;
use std::time::Duration;

use assert_cmd::Command;
use tempfile::{TempDir, tempdir};

/// The command's own file.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_cloud-hypervisor");

/// The exit code of a configuration that cannot be run.
pub(crate) const WRONG: i32 = 1;
/// The exit code of an invalid command line, including the keys and values of its options.
pub(crate) const USAGE: i32 = 2;

/// The command, run in its own directory, which must be as empty afterwards as before.
pub(crate) struct Run {
    pub command: Command,
    home: TempDir,
    /// Prefix of its taps' names, unique among tests that may run at the same time.
    taps: &'static str,
}

impl Run {
    /// The command with these arguments.
    pub(crate) fn new(arguments: &[&str]) -> Self {
        let home = tempdir().unwrap();
        let mut command = StdCommand::new(BINARY);
        command.args(arguments);
        Self::of(command, home)
    }

    /// Another way to start it, in this directory.
    pub(crate) fn of(command: StdCommand, home: TempDir) -> Self {
        fixtures::namespace::enter();
        let mut command = Command::from_std(command);
        command.current_dir(home.path()).timeout(Duration::from_secs(60));
        Self { command, home, taps: "clitest" }
    }

    /// Sets the prefix of its taps' names.
    pub(crate) fn with_taps(mut self, prefix: &'static str) -> Self {
        self.taps = prefix;
        self
    }

    /// Runs it; it must fail with `code`, print exactly one line on standard error and leave nothing behind.
    pub(crate) fn refused(mut self, code: i32) -> String {
        let output = self.command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{said}");
        assert!(said.ends_with('\n') && said.lines().count() == 1, "not one line: {said}");
        let left: Vec<_> = fs::read_dir(self.home.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?} left behind");
        let made: Vec<_> = interfaces().into_iter().filter(|name| name.starts_with(self.taps)).collect();
        assert!(made.is_empty(), "{made:?} left behind");
        let said = said.trim_end();
        said.strip_prefix("cloud-hypervisor: ").unwrap_or_else(|| panic!("{said}")).to_string()
    }
}

/// The host's network interfaces.
pub(crate) fn interfaces() -> Vec<String> {
    let all = fs::read_dir("/sys/class/net").unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
