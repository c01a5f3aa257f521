//! The VMM under test, as a process.

pub(crate) mod api;
pub(crate) mod shared_memory;
pub(crate) mod terminal;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::lab;
use crate::vmm::api::Api;

/// The command line of a VMM, to be started.
pub struct VmmCommand {
    command: Command,
    inherited: Vec<OwnedFd>,
}

impl VmmCommand {
    /// A command without arguments.
    #[expect(clippy::new_without_default, reason = "it needs the lab, which `default` should not")]
    pub fn new() -> VmmCommand {
        let mut command = Command::new(lab::vmm_binary());
        command.args(lab::vmm_arguments());
        VmmCommand { command, inherited: Vec::new() }
    }

    /// Adds one argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> VmmCommand {
        self.command.arg(argument);
        self
    }

    /// Adds several arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> VmmCommand {
        self.command.args(arguments);
        self
    }

    /// Makes the VMM inherit `fd`, under the same number.
    pub fn inherit(mut self, fd: OwnedFd) -> VmmCommand {
        self.inherited.push(fd);
        self
    }

    /// Runs the VMM as the user `uid`, without groups or capabilities.
    pub fn user(mut self, uid: u32) -> VmmCommand {
        self.command.uid(uid).gid(uid);
        self
    }

    /// Limits the VMM to `limit` open files, as `ulimit -n` does.
    pub fn open_files(mut self, limit: u64) -> VmmCommand {
        let lower = move || {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: `limit` outlives the call, which only reads it.
            if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        };
        // SAFETY: the closure only makes a system call, which is sound between fork and exec.
        unsafe { self.command.pre_exec(lower) };
        self
    }

    /// Hides `/dev/kvm` from the VMM, as on a machine without KVM.
    pub fn without_kvm(mut self) -> VmmCommand {
        let hide = || {
            let null = std::ptr::null();
            // SAFETY: the strings are literals with a NUL, and mount and unshare touch no memory of this process.
            let done = unsafe {
                libc::unshare(libc::CLONE_NEWNS) == 0
                    && libc::mount(null, c"/".as_ptr(), null, libc::MS_REC | libc::MS_PRIVATE, null.cast()) == 0
                    && libc::mount(c"tmpfs".as_ptr(), c"/dev".as_ptr(), c"tmpfs".as_ptr(), 0, null.cast()) == 0
            };
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: the closure only makes system calls, which is sound between fork and exec.
        unsafe { self.command.pre_exec(hide) };
        self
    }

    /// Connects the VMM's standard input and output to the results of `stdio`.
    pub(crate) fn stdio(&mut self, stdio: impl Fn() -> Stdio) -> &mut VmmCommand {
        self.command.stdin(stdio()).stdout(stdio());
        self
    }

    /// Starts the VMM with its standard streams connected to the result.
    pub fn spawn(mut self) -> Vmm {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped());
        self.spawn_as_it_is()
    }

    pub(crate) fn spawn_as_it_is(mut self) -> Vmm {
        let numbers: Vec<i32> = self.inherited.iter().map(AsRawFd::as_raw_fd).collect();
        let prepare = move || {
            // The VMM ends with the test, even if the test is killed.
            // SAFETY: prctl with PR_SET_PDEATHSIG has no memory effects.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            for &fd in &numbers {
                // SAFETY: fcntl with F_SETFD has no memory effects.
                if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: the closure only makes system calls, which is sound between fork and exec.
        unsafe { self.command.pre_exec(prepare) };
        let started = Instant::now();
        let mut child = self.command.stderr(Stdio::piped()).spawn().expect("the VMM's binary can be executed");
        let mut stderr = child.stderr.take().expect("it was piped");
        let errors = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&errors);
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stderr.read(&mut buffer) {
                sink.lock().push_str(&String::from_utf8_lossy(&buffer[..length]));
            }
        });
        let api = self.command.get_args().skip_while(|argument| *argument != "--api-socket").nth(1);
        let api = api.map(|argument| Api::of(&argument.to_string_lossy()));
        Vmm { child, errors, reader: Some(reader), started, api }
    }

    /// Runs the VMM until it exits, which must be within 60 s. Its standard input is empty.
    pub fn run(mut self) -> Exit {
        self.command.stdin(Stdio::null()).stdout(Stdio::null());
        self.spawn_as_it_is().wait(Duration::from_secs(60))
    }
}

/// A running VMM. It is killed when this is dropped.
pub struct Vmm {
    child: Child,
    errors: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
    started: Instant,
    api: Option<Api>,
}

/// Exit of a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, or `None` if a signal killed it.
    pub code: Option<i32>,
    /// All that it wrote to standard error.
    pub errors: String,
}

impl Vmm {
    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Modes of the system call filters of its threads, by thread name (`proc_pid_status(5)`): `2` is a filter program.
    /// Without the threads that the kernel adds to a process that uses KVM, vhost or io_uring.
    pub fn seccomp_modes(&self) -> BTreeMap<String, String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).expect("the VMM runs");
        let status = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
        let modes = status.filter_map(|status| {
            let line =
                |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().into());
            Some((line("Name:")?, line("Seccomp:")?))
        });
        let of_kernel = |name: &String| ["kvm-", "vhost-", "iou-"].iter().any(|kind| name.starts_with(kind));
        modes.filter(|(name, _)| !of_kernel(name)).collect()
    }

    /// Time at which its process was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// API, if its command line has one.
    pub(crate) fn api(&self) -> Option<&Api> {
        self.api.as_ref()
    }

    /// Text that it has written to standard error so far.
    pub fn errors(&self) -> String {
        self.errors.lock().clone()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill has no memory effects, and the child is not reaped before this is dropped.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0, "sending signal {signal} to the VMM");
    }

    /// True if it is still running.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the VMM is our child").is_none()
    }

    /// Waits up to `limit` until it has exited. Returns true if it has.
    pub(crate) fn exits_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.is_running() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        !self.is_running()
    }

    /// Activity of each thread: its name, its state, and the kernel function in which it waits.
    pub(crate) fn threads(&self) -> String {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.id())) else { return String::new() };
        let read = |path: std::path::PathBuf| fs::read_to_string(path).unwrap_or_default();
        let told = tasks.flatten().map(|task| {
            let (stat, stack) = (read(task.path().join("stat")), read(task.path().join("stack")));
            format!("{}{stack}", stat.split_inclusive(' ').take(3).collect::<String>() + "\n")
        });
        told.collect()
    }

    /// Waits until it exits. Panics if that takes longer than `limit`.
    pub fn wait(mut self, limit: Duration) -> Exit {
        let deadline = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the VMM is our child") {
                break status;
            }
            assert!(Instant::now() < deadline, "the VMM is still running after {limit:?}; it wrote: {}", self.errors());
            thread::sleep(Duration::from_millis(5));
        };
        if let Some(reader) = self.reader.take() {
            reader.join().expect("reading the VMM's error output");
        }
        Exit { code: status.code(), errors: self.errors() }
    }

    pub(crate) fn take_stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("the VMM's input is piped")
    }

    pub(crate) fn take_stdout(&mut self) -> ChildStdout {
        self.child.stdout.take().expect("the VMM's output is piped")
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
