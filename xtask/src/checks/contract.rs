//! `cargo xtask test contract`: schemathesis sends requests generated from `api/openapi.yaml` to the running program.
//!
//! The program runs in an empty folder and in its own network namespace, where any tap can be created. It is tested
//! without a virtual machine, which the requests then create, and with a running guest.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::checks::splice::Splice;
use crate::checks::suite::Tally;
use crate::error::{Context, Error, Result};
use crate::fetch::python;
use crate::progress::{Step, note};

/// The release of schemathesis that this was written for.
const SCHEMATHESIS: &str = "schemathesis==4.32.5";
/// Checks. They do not include the success of every valid request: most requests name a file of the host.
const CHECKS: &str = "not_a_server_error,status_code_conformance,unsupported_method,content_type_conformance,\
                      response_headers_conformance,response_schema_conformance,negative_data_rejection,\
                      allow_header_conformance";
/// Time that the program may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time between two requests to cancel a migration, far below the time that schemathesis waits for an answer.
const CANCEL_EVERY: Duration = Duration::from_millis(200);
/// The guest's kernel in the program's folder.
const KERNEL: &str = "kernel";
/// Options of the guest that runs from the start.
const GUEST: &[&str] = &[
    "--kernel",
    KERNEL,
    "--memory",
    "size=16M",
    "--cpus",
    "boot=2",
    "--net",
    "id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=4",
];

/// Run of schemathesis.
struct Pass {
    name: &'static str,
    has_guest: bool,
    /// The prefix of the description's paths on the server.
    root: &'static str,
    /// Options of schemathesis that choose the operations.
    operations: &'static [&'static str],
}

const PASSES: &[Pass] = &[
    Pass {
        name: "without a guest",
        has_guest: false,
        root: "/api/v1",
        operations: &["--exclude-operation-id", "shutdownVMM", "--exclude-operation-id", "metricsGet"],
    },
    Pass {
        name: "with a guest that runs",
        has_guest: true,
        root: "/api/v1",
        // Without operations that would end the guest, or do not depend on it.
        operations: &[
            "--include-operation-id-regex",
            "^(bootVM|pauseVM|resumeVM|rebootVM|powerButtonVM|vm(Info|Counters)Get|\
             vm(Nmi|Add(?!UserDevice)[A-Za-z]+|RemoveDevice|Resize|SetVf)Put)$",
        ],
    },
    Pass { name: "metrics", has_guest: true, root: "", operations: &["--include-operation-id", "metricsGet"] },
];

/// Sends some thousands of requests generated from the description to `program`, and about `cases` random ones. Each
/// operation in each run counts as a test.
pub(crate) fn run(workspace: &Path, program: &Path, cases: usize) -> Result<Tally> {
    let folder = workspace.join("target/lab/contract");
    fs::create_dir_all(&folder).context(folder.display())?;
    let schemathesis = python::tool(workspace, SCHEMATHESIS, "st")?;
    let mut tally = Tally::default();
    for pass in PASSES {
        let run = Run { workspace, folder: &folder, schemathesis: &schemathesis, program, pass };
        tally += run.ask(cases)?;
    }
    Ok(tally)
}

/// A run with its resources.
struct Run<'a> {
    workspace: &'a Path,
    folder: &'a Path,
    schemathesis: &'a Path,
    program: &'a Path,
    pass: &'a Pass,
}

impl Run<'_> {
    fn ask(&self, cases: usize) -> Result<Tally> {
        let step = Step::begin("contract", self.pass.name);
        let guest = if self.pass.has_guest { GUEST } else { &[] };
        let mut vmm = Vmm::start(self.folder, self.program, guest)?;
        let splice = Splice::start(&vmm.socket).context("listening on 127.0.0.1")?;
        let report = self.folder.join("report.json");
        // The report of an earlier run must not count.
        let _ = fs::remove_file(&report);
        // A request to receive a VM is answered when a VM has arrived, or when the request is cancelled.
        let cancelling = (!self.pass.has_guest).then(|| Cancelling::start(&vmm.socket));
        let asked = self.command(&splice, &report, cases).output().context("running schemathesis")?;
        drop(cancelling);
        let mut tally = tally(&fs::read_to_string(&report).unwrap_or_default());
        if asked.status.success() != (tally.failed == 0) {
            tally.failed = tally.failed.max(1);
        }
        if tally.failed > 0 {
            println!("\n{}{}", String::from_utf8_lossy(&asked.stdout), String::from_utf8_lossy(&asked.stderr));
        }
        drop(splice);
        // The program must have survived, and still accept requests.
        match vmm.shut_down() {
            Ok(()) => tally.passed += 1,
            Err(error) => {
                note("FAILED", error);
                tally.failed += 1;
            }
        }
        let generated = generated(&fs::read_to_string(&report).unwrap_or_default());
        step.done_with(format!(
            "{}: {generated} requests, {} operations as described, {} not",
            self.pass.name, tally.passed, tally.failed
        ));
        Ok(tally)
    }

    fn command(&self, splice: &Splice, report: &Path, cases: usize) -> Command {
        /// The approximate number of operations.
        const OPERATIONS: usize = 32;
        let api = self.workspace.join("api");
        let mut command = Command::new(self.schemathesis);
        command.current_dir(self.folder).stdin(Stdio::null());
        command.arg("--config-file").arg(api.join("schemathesis.toml"));
        command.arg("run").arg(api.join("openapi.yaml")).args(self.pass.operations);
        command.arg("--url").arg(format!("http://{}{}", splice.address(), self.pass.root));
        command.args(["--checks", CHECKS, "--max-examples", &(cases / OPERATIONS).max(1).to_string()]);
        command.args(["--no-color", "--generation-database", "none", "--warnings", "off"]);
        command.args(["--report", "json", "--report-json-path"]).arg(report);
        command
    }
}

/// Numbers of operations that conformed and that did not, from schemathesis' report.
fn tally(report: &str) -> Tally {
    let report: Value = serde_json::from_str(report).unwrap_or_default();
    let tested = report.pointer("/operations/tested").and_then(Value::as_u64).unwrap_or(0);
    let failures = report.get("failures").and_then(Value::as_array);
    let mut failed: Vec<&str> = failures
        .into_iter()
        .flatten()
        .filter_map(|failure| failure.get("operations")?.as_array())
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    failed.sort_unstable();
    failed.dedup();
    let errors = report.get("errors").and_then(Value::as_array).map_or(0, Vec::len);
    let tested = usize::try_from(tested).unwrap_or(0);
    let failed = if tested == 0 { 1 } else { failed.len() + errors };
    Tally { passed: tested.saturating_sub(failed), failed }
}

fn generated(report: &str) -> u64 {
    let report: Value = serde_json::from_str(report).unwrap_or_default();
    report.pointer("/test_cases/generated").and_then(Value::as_u64).unwrap_or(0)
}

/// The program under test, in a folder of its own with a kernel that halts.
pub(crate) struct Vmm {
    child: Child,
    pub socket: PathBuf,
}

impl Vmm {
    /// Starts `program` with these further options in a folder below `folder`, and waits until it serves requests.
    pub(crate) fn start(folder: &Path, program: &Path, options: &[&str]) -> Result<Vmm> {
        let log = folder.join("program.log");
        let folder = folder.join("program");
        if folder.exists() {
            fs::remove_dir_all(&folder).context(folder.display())?;
        }
        fs::create_dir_all(&folder).context(folder.display())?;
        let socket = folder.join("api.sock");
        let log = fs::File::create(&log).context(log.display())?;
        let kernel = folder.join(KERNEL);
        fs::write(&kernel, halting_kernel()).context(kernel.display())?;
        let mut command = Command::new("unshare");
        // A user who is not root becomes root in a user namespace.
        let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
        command.args((!is_root).then_some("--map-root-user")).args(["--net", "--"]).arg(program);
        command.arg("--api-socket").arg(&socket).args(options);
        let errors = log.try_clone().context("duplicating a file")?;
        command.current_dir(&folder).stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().context("running unshare")?;
        let mut vmm = Vmm { child, socket };
        vmm.wait_until_it_serves()?;
        Ok(vmm)
    }

    fn wait_until_it_serves(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.request("GET /api/v1/vmm.ping").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 ")) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait().context("waiting for the program")? {
                return Err(Error::new(format!(
                    "the program did not start ({status}); see its program.log below target/lab"
                )));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(Error::new("the program does not answer on its API socket; see its program.log below target/lab"))
    }

    /// The whole answer to a request without a body.
    fn request(&self, line: &str) -> std::io::Result<String> {
        request(&self.socket, line)
    }

    /// Shuts the program down with a request.
    pub(crate) fn shut_down(&mut self) -> Result<()> {
        let answer = self.request("PUT /api/v1/vmm.shutdown").context("vmm.shutdown")?;
        if !answer.starts_with("HTTP/1.1 200 ") {
            return Err(Error::new(format!("vmm.shutdown: {answer}")));
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().context("waiting for the program")? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(Error::new(format!("the program ended with {status}"))),
                None if Instant::now() > deadline => {
                    return Err(Error::new("the program does not end after vmm.shutdown"));
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // The program has ended already, unless a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The whole answer to a request without a body.
fn request(socket: &Path, line: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A thread that cancels migrations until this is dropped.
struct Cancelling {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Cancelling {
    fn start(socket: &Path) -> Cancelling {
        let (over, socket) = (Arc::new(AtomicBool::new(false)), socket.to_owned());
        let ended = Arc::clone(&over);
        let thread = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                // Most of the time there is no migration.
                let _ = request(&socket, "PUT /api/v1/vm.cancel-migration");
                thread::sleep(CANCEL_EVERY);
            }
        });
        Cancelling { over, thread: Some(thread) }
    }
}

impl Drop for Cancelling {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A kernel that halts: an ELF file with a PVH entry (`Xen, PVH boot protocol`) and two instructions, `hlt` and a jump
/// back to it.
fn halting_kernel() -> Vec<u8> {
    const CODE: u32 = 0x20_0000;
    const NOTE_AT: u64 = 64 + 2 * 56;
    const CODE_AT: u64 = NOTE_AT + 20;
    const INSTRUCTIONS: [u8; 3] = [0xf4, 0xeb, 0xfd];
    // Identification; executable, x86-64, version 1; entry, program headers at 64, no sections; sizes and counts.
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2u16, 62].map(u16::to_le_bytes).concat());
    file.extend(1u32.to_le_bytes());
    file.extend([u64::from(CODE), 64, 0].map(u64::to_le_bytes).concat());
    file.extend(0u32.to_le_bytes());
    file.extend([64u16, 56, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
    for (kind, offset, address, length) in
        [(4u64, NOTE_AT, 0, 20), (1, CODE_AT, u64::from(CODE), INSTRUCTIONS.len() as u64)]
    {
        file.extend([kind, offset, address, address, length, length, 0].map(u64::to_le_bytes).concat());
    }
    file.extend([4, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE].map(u32::to_le_bytes).concat());
    file.extend(INSTRUCTIONS);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_counted_by_operations() {
        let report = r#"{"operations": {"tested": 5}, "errors": [], "test_cases": {"generated": 99},
            "failures": [{"operations": ["PUT /a", "PUT /b"]}, {"operations": ["PUT /a"]}]}"#;
        assert_eq!(tally(report), Tally { passed: 3, failed: 2 });
        assert_eq!(generated(report), 99);
    }

    #[test]
    fn no_report_is_a_failure() {
        assert_eq!(tally(""), Tally { passed: 0, failed: 1 });
        assert_eq!(tally("{}"), Tally { passed: 0, failed: 1 });
    }

    #[test]
    fn a_kernel_has_its_code_where_its_header_says() {
        let file = halting_kernel();
        assert_eq!(file.len(), 64 + 2 * 56 + 20 + 3);
        assert_eq!(file[64 + 56 + 8..][..8], (64u64 + 2 * 56 + 20).to_le_bytes());
        assert!(file.ends_with(&[0xf4, 0xeb, 0xfd]));
    }
}
