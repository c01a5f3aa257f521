//! A VMM with an API socket, and its client.

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::{TempDir, tempdir};

pub(crate) const VMM: &str = env!("CARGO_BIN_EXE_cloud-hypervisor");
pub(crate) const REMOTE: &str = env!("CARGO_BIN_EXE_ch-remote");

/// Limit of each wait on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A VMM, started without a VM. It is killed when this is dropped.
pub(crate) struct Vmm {
    pub process: Child,
    home: TempDir,
}

impl Vmm {
    /// Starts it with additional arguments, and waits for its socket.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let home = tempdir().unwrap();
        let log = File::create(home.path().join("log")).unwrap();
        let socket = home.path().join("socket");
        let mut command = Command::new(VMM);
        command.arg("--api-socket").arg(&socket).args(arguments);
        let process = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let vmm = Self { process, home };
        // The socket exists a moment before the program listens.
        wait_for("the socket", || UnixStream::connect(&socket).is_ok());
        vmm
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Runs `ch-remote` with these arguments.
    pub(crate) fn remote(&self, arguments: &[&str]) -> Output {
        self.remote_command(arguments).output().unwrap()
    }

    pub(crate) fn remote_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(REMOTE);
        command.arg("--api-socket").arg(self.path("socket")).args(arguments).stdin(Stdio::null());
        command
    }

    /// Runs `ch-remote`, which must succeed, and returns its output.
    pub(crate) fn done(&self, arguments: &[&str]) -> String {
        let output = self.remote(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.as_str()), (Some(0), ""), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `ch-remote`, which must fail, and returns its error line.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        self.failed(arguments, 1)
    }

    /// As [`Self::refused`], for a malformed command line.
    pub(crate) fn misused(&self, arguments: &[&str]) -> String {
        self.failed(arguments, 2)
    }

    fn failed(&self, arguments: &[&str], code: i32) -> String {
        let output = self.remote(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        said.trim_end().to_string()
    }

    /// Waits until the VMM exits, and returns the exit code.
    pub(crate) fn end(mut self) -> Option<i32> {
        let mut status = None;
        wait_for("the VMM's exit", || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let mut log = String::new();
            let _ = File::open(self.path("log")).and_then(|mut file| file.read_to_string(&mut log));
            eprintln!("the VMM printed:\n{log}");
        }
    }
}

pub(crate) fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_there() {
        assert!(Instant::now() < until, "waiting for {what} took too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}
