//! The integration tests. Each test is a process of its own; workers take tests from one queue.

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::fetch::apt::output;
use crate::guest_tools;
use crate::lab::{BACKPORTS, FIRST_LEVEL_KERNEL, GENERIC_BACKPORTS, GENERIC_KERNEL, GENERIC_KERNEL_6_1, Lab, cni};
use crate::machine::iommufd;
use crate::machine::lab_kind::{LabKind, Worker};
use crate::machine::nested::{Clock, FAST_KERNEL, Lost, Machine, Nics};
use crate::machine::newer_qemu;
use crate::progress::{note, seconds};

/// Time that a test may take. The harness has shorter limits; this one applies if the harness hangs as well.
const TEST_LIMIT: Duration = Duration::from_secs(300);
/// The variables that set the repetitions of endurance tests. With one of them, a test may take [`LONG_LIMIT`].
const ROUNDS: [&str; 7] = [
    "CH_MEMORY_ROUNDS",
    "CH_MIGRATIONS",
    "CH_SWITCH_CYCLES",
    "CH_UNMAPS",
    "CH_VFIO_BOOTS",
    "CH_VFIO_ROUNDS",
    "CH_X550_CYCLES",
];
/// Time that a test may take in a longer run.
const LONG_LIMIT: Duration = Duration::from_secs(3600);
/// Time that a test may take in a machine whose clock counts instructions, which is slower.
const COUNTING_LIMIT: Duration = Duration::from_secs(1800);
/// Time that a test may take if its guests start with hypervisor-fw, which reads a kernel for some 20 s each time.
const HYPERVISOR_FW_LIMIT: Duration = Duration::from_secs(900);
/// The files of these tests have this in their names.
const HYPERVISOR_FW_TESTS: &str = "hypervisor_fw";
/// Prefix of the files of tests whose guests start with UEFI firmware. QEMU's emulation of a nested guest aborts in
/// firmware, with an assertion on its own lock, unless the machine's clock counts instructions.
const FIRMWARE_TESTS: &str = "firmware";
/// Prefix of the files of tests whose guests compare time with a device, which need such a clock as well. In real time,
/// an exit in the nested lab takes longer than Linux allows for reading the device.
const TIMER_TESTS: &str = "timers";
/// Part of the names of tests that boot Debian's generic kernel, which has drivers that the cloud kernel lacks.
const GENERIC_TESTS: &str = "generic";
/// Prefix of the files of tests with an emulated X550, whose guests run Debian's generic kernels as well.
const X550_TESTS: &str = "x550";
/// The test files whose guests run CNI plugins, which are built from modules of Go.
const CNI_TESTS: [&str; 4] = ["x550_cni", "x550_node", "guest_control_cni", "guest_control_node"];
/// The test files whose guests also run the programs of a Kubernetes node, in longer tests.
const NODE_TESTS: [&str; 2] = ["x550_node", "guest_control_node"];
/// Prefix of the files of tests whose guests govern their VFs, by programs that are built for them.
const GUEST_CONTROL_TESTS: &str = "guest_control";
/// Prefix of the files of tests that pass devices of the first-level machine through to guests.
const VFIO_TESTS: &str = "vfio";
/// The VFIO test file that needs a kernel with iommufd.
const IOMMUFD_TESTS: &str = "vfio_iommufd";
/// Prefix of the files of tests that run systemd, which never runs on this machine.
const SYSTEMD_TESTS: &str = "systemd";
/// Path of the modules that VFIO tests load, in the folder of that machine's kernel.
const VFIO_MODULES: &str = "extra/vfio-pci";

/// Numbers of tests that passed and failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

/// A run of the integration tests.
pub(crate) struct Suite<'a> {
    /// The lab.
    pub lab: &'a Lab,
    /// The root of the checkout.
    pub workspace: &'a Path,
    /// The command under test.
    pub vmm: &'a Path,
    /// The folder of the fixtures.
    pub fixtures: &'a Path,
    /// Each binary of integration tests, after what stands before the names of its tests.
    pub tests: &'a [(String, PathBuf)],
    /// Machine on which guests run.
    pub place: LabKind,
    /// Part of the names of the tests to run.
    pub filter: &'a str,
    /// True to run the longer tests as well, which the test harness ignores by default.
    pub all: bool,
    /// True to rewrite the expectations from the guests' output.
    pub bless: bool,
    /// True to show all output of a test while it runs.
    pub verbose: bool,
}

/// A single test.
#[derive(Clone)]
struct Test {
    /// Name of its file, which is a module of the binary or the binary itself.
    file: String,
    /// Name in its file.
    name: String,
    binary: PathBuf,
    /// Name in its binary.
    path: String,
    retried: bool,
}

impl Test {
    /// The test called `full`, `file::name`, which `binary` knows as `path`.
    fn new(full: &str, path: String, binary: &Path) -> Result<Self> {
        let (file, name) = full
            .split_once("::")
            .ok_or_else(|| Error::new(format!("the test {full} is in no file: move it into one")))?;
        Ok(Self { file: file.to_owned(), name: name.to_owned(), binary: binary.to_owned(), path, retried: false })
    }

    /// The machine in which the test runs, if that is emulated.
    fn machine(&self) -> Machine {
        match self.file.as_str() {
            IOMMUFD_TESTS => Machine::IOMMUFD,
            file if file.starts_with(VFIO_TESTS) => Machine::VFIO,
            file if file.starts_with(FIRMWARE_TESTS) || file.starts_with(TIMER_TESTS) => {
                Machine::plain(Clock::Instructions)
            }
            _ => Machine::plain(Clock::Real),
        }
    }

    /// The kernels of its guests that only some tests need. With `all`, tests of generic kernels boot two.
    fn kernels(&self, all: bool) -> Vec<&'static str> {
        let is_x550 = self.file.starts_with(X550_TESTS);
        let is_generic = is_x550 || self.name.contains(GENERIC_TESTS) || self.machine().nics == Nics::Vfio;
        match self.name.contains(BACKPORTS) {
            true if is_x550 => vec![GENERIC_BACKPORTS],
            true => vec![BACKPORTS],
            false if is_generic && all => vec![GENERIC_KERNEL, GENERIC_KERNEL_6_1],
            false if is_generic => vec![GENERIC_KERNEL],
            false => Vec::new(),
        }
    }

    /// True if the test runs in an emulated machine even if guests run on this one: what it does concerns a whole
    /// machine.
    fn is_always_nested(&self) -> bool {
        self.machine().nics == Nics::Vfio || self.file.starts_with(SYSTEMD_TESTS)
    }

    /// Time that the test may take.
    fn limit(&self) -> Duration {
        match self.machine().clock {
            Clock::Real if ROUNDS.iter().any(|name| std::env::var_os(name).is_some()) => LONG_LIMIT,
            Clock::Real if self.file.contains(HYPERVISOR_FW_TESTS) => HYPERVISOR_FW_LIMIT,
            Clock::Real => TEST_LIMIT,
            Clock::Instructions => COUNTING_LIMIT,
        }
    }
}

/// Result of a test.
struct Report {
    test: Test,
    outcome: Outcome,
    took: Duration,
    output: String,
}

/// The lab of a worker, and its machine there.
type Place = (LabKind, Machine);

enum Outcome {
    Passed,
    Failed,
    Lost(Lost),
    NoWorker(Error),
}

impl Suite<'_> {
    /// Runs the tests and prints a line for each, with the whole output of failed ones.
    pub(crate) fn run(&self) -> Result<Tally> {
        let queue = Mutex::new(self.tests()?);
        let total = queue.lock().len();
        if total == 0 {
            let hint = if self.all { "" } else { "; --all adds the longer tests" };
            return Err(Error::new(format!("no integration test has {:?} in its name{hint}", self.filter)));
        }
        let kernels: BTreeSet<_> = queue.lock().iter().flat_map(|test| test.kernels(self.all)).collect();
        kernels.into_iter().try_for_each(|kernel| self.lab.prepare(kernel))?;
        if queue.lock().iter().any(|test| CNI_TESTS.contains(&test.file.as_str())) {
            cni::prepare(self.lab, self.workspace, &cni::PLUGINS)?;
        }
        if queue.lock().iter().any(|test| NODE_TESTS.contains(&test.file.as_str())) {
            cni::prepare(self.lab, self.workspace, &cni::NODE)?;
        }
        if queue.lock().iter().any(|test| test.file.starts_with(GUEST_CONTROL_TESTS)) {
            guest_tools::archive(self.lab, self.workspace)?;
        }
        let workers = self.place.workers().min(total);
        note("test", format!("{total} integration tests, {}", self.description(workers)));
        if queue.lock().iter().any(|test| test.machine() == Machine::IOMMUFD) {
            iommufd::prepare(self.lab)?;
        }
        if queue.lock().iter().any(|test| test.machine().nics == Nics::Vfio) {
            self.lab.kernel(FIRST_LEVEL_KERNEL, VFIO_MODULES)?;
            newer_qemu::fetch(self.lab)?;
        }
        let (sender, reports) = channel();
        let mut tally = Tally::default();
        thread::scope(|scope| {
            for number in 0..workers {
                let (queue, sender) = (&queue, sender.clone());
                scope.spawn(move || self.work(number, queue, &sender));
            }
            drop(sender);
            for report in reports {
                let passed = matches!(report.outcome, Outcome::Passed);
                tally += Tally { passed: usize::from(passed), failed: usize::from(!passed) };
                print(&report);
            }
        });
        // Tests that no worker ran did not pass.
        let left = queue.lock().len();
        if left > 0 {
            note("FAILED", format!("{left} tests did not run: no machine is left for them"));
        }
        tally.failed += left;
        Ok(tally)
    }

    fn description(&self, workers: usize) -> String {
        match self.place {
            LabKind::Host => "on this machine's own KVM".into(),
            LabKind::Nested => format!("in {workers} first-level machines under emulation"),
        }
    }

    fn tests(&self) -> Result<VecDeque<Test>> {
        let mut tests = VecDeque::new();
        for (prefix, binary) in self.tests {
            let longer = if self.all { Vec::new() } else { names(binary, &["--ignored"])? };
            for path in names(binary, &[])? {
                let full = format!("{prefix}{path}");
                if full.contains(self.filter) && !longer.contains(&path) {
                    let test = Test::new(&full, path, binary)?;
                    // The longest tests come first, so that other workers stay busy.
                    match test.machine() == Machine::plain(Clock::Real) {
                        false => tests.push_front(test),
                        true => tests.push_back(test),
                    }
                }
            }
        }
        Ok(tests)
    }

    fn work(&self, number: usize, queue: &Mutex<VecDeque<Test>>, reports: &Sender<Report>) {
        let mut worker = None;
        loop {
            let Some(test) = queue.lock().pop_front() else { return };
            let machine = test.machine();
            let place = if test.is_always_nested() { LabKind::Nested } else { self.place };
            // Tests of all kinds run on this machine itself.
            let fits = |its: &Place| its.0 == place && (its.1 == machine || place == LabKind::Host);
            let ready = match worker.take().filter(|(its, _)| fits(its)) {
                Some((_, ready)) => Ok(ready),
                None => self.worker(place, number, &machine),
            };
            let report = match ready {
                Ok(ready) => self.run_one(test, &mut worker.insert(((place, machine), ready)).1),
                Err(error) => Report::without_worker(test, error),
            };
            if let Outcome::Lost(lost) = &report.outcome {
                // The test's machine is in an unknown state.
                worker = None;
                if !report.test.retried {
                    let Test { file, name, .. } = &report.test;
                    note("retry", format!("{file}::{name}: {}", lost.explain(report.test.limit())));
                    queue.lock().push_back(Test { retried: true, ..report.test });
                    continue;
                }
            }
            let over = matches!(report.outcome, Outcome::NoWorker(_));
            if reports.send(report).is_err() || over {
                return;
            }
        }
    }

    /// A worker, whose start is retried once.
    fn worker(&self, place: LabKind, number: usize, machine: &Machine) -> Result<Worker> {
        let worker = || place.worker_in(self.lab, self.workspace, number, machine);
        worker().or_else(|error| {
            note("retry", error);
            worker()
        })
    }

    fn run_one(&self, test: Test, worker: &mut Worker) -> Report {
        let started = Instant::now();
        let mut text = String::new();
        let result = worker.run(&self.command_line(&test), test.limit(), &mut |line| {
            if self.verbose {
                println!("          {} | {line}", test.name);
            }
            text.push_str(line);
            text.push('\n');
        });
        let outcome = match result {
            Ok(0) => Outcome::Passed,
            // A broken kernel below the guest explains the failure.
            Ok(_) => worker.complaint().map_or(Outcome::Failed, |how| Outcome::Lost(Lost::MachineBroken(how))),
            Err(lost) => Outcome::Lost(lost),
        };
        Report { test, outcome, took: started.elapsed(), output: text }
    }

    fn command_line(&self, test: &Test) -> String {
        let mut line = environment(self.lab, self.vmm, Some(self.fixtures));
        if self.place == LabKind::Nested {
            line += &format!("CH_KERNEL_PARAMETERS={} ", quote(Path::new(FAST_KERNEL)));
        }
        if self.bless {
            line += "CH_BLESS=1 ";
        }
        if test.machine() == Machine::IOMMUFD {
            line += &format!("CH_MACHINE={} ", iommufd::KERNEL);
        }
        // The repetitions of endurance tests.
        for name in ROUNDS {
            if let Some(rounds) = std::env::var_os(name) {
                line += &format!("{name}={} ", quote(Path::new(&rounds)));
            }
        }
        line += &format!(
            "RUST_BACKTRACE=0 {} --exact {} --include-ignored --test-threads=1",
            quote(&test.binary),
            test.path
        );
        if self.verbose { line + " --nocapture" } else { line }
    }
}

/// The names of the tests in a test binary: all of them, or those that these options select.
fn names(binary: &Path, options: &[&str]) -> Result<Vec<String>> {
    let list = output(Command::new(binary).args(["--list", "--format", "terse"]).args(options))?;
    Ok(list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// The start of a shell command: the variables with the paths of the lab, the command under test and the fixtures, for
/// the harness. The shell execs the rest, so that killing it leaves no process behind.
pub(crate) fn environment(lab: &Lab, vmm: &Path, fixtures: Option<&Path>) -> String {
    let fixtures = fixtures.map_or(String::new(), |folder| format!("CH_FIXTURES={} ", quote(folder)));
    format!("exec env CH_LAB={} CH_BINARY={} {fixtures}", quote(lab.folder()), quote(vmm))
}

/// The caller's `CH_ARGUMENTS`, further arguments of the VMM, as a shell's assignment.
pub(crate) fn vmm_arguments() -> String {
    let arguments = std::env::var("CH_ARGUMENTS").unwrap_or_default();
    format!("CH_ARGUMENTS={}", quote(Path::new(&arguments)))
}

/// A path as one word of a shell command.
pub(crate) fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

impl Report {
    fn without_worker(test: Test, error: Error) -> Report {
        Report { test, outcome: Outcome::NoWorker(error), took: Duration::ZERO, output: String::new() }
    }
}

fn print(report: &Report) {
    let Test { file, name, retried, .. } = &report.test;
    let took = seconds(report.took);
    let again = if *retried { ", at the second attempt" } else { "" };
    match &report.outcome {
        Outcome::Passed => note("ok", format!("{file}::{name}  ({took}{again})")),
        Outcome::Failed => note("FAILED", format!("{file}::{name}  ({took}{again})\n{}", report.output)),
        Outcome::Lost(lost) => {
            let why = lost.explain(report.test.limit());
            note("FAILED", format!("{file}::{name}: {why} twice\n{}", report.output));
        }
        Outcome::NoWorker(error) => note("FAILED", format!("{file}::{name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_module_of_a_test_is_its_file_and_routes_it() {
        let of_binary = |full: &str| Test::new(full, "a::b".to_owned(), Path::new("/t/host_devices-1")).unwrap();
        let test = of_binary("vfio_iommufd::a_vf::case_1");
        assert_eq!(
            (test.file.as_str(), test.name.as_str(), test.path.as_str()),
            ("vfio_iommufd", "a_vf::case_1", "a::b")
        );
        assert!(test.machine() == Machine::IOMMUFD && of_binary("vfio::a_nic").machine() == Machine::VFIO);
        assert!(of_binary("timers::a_clock").machine() == Machine::plain(Clock::Instructions));
        assert!(of_binary("systemd::a_unit").is_always_nested() && !of_binary("nic::a_nic").is_always_nested());
        assert_eq!(of_binary("vfio_hypervisor_fw::a").limit(), of_binary("hypervisor_fw::a").limit());
        let kernels = |full: &str| of_binary(full).kernels(false);
        assert_eq!(kernels("x550_vfs::a_vf::case_2_backports"), [GENERIC_BACKPORTS]);
        assert_eq!((kernels("x550_vfs::a_vf"), kernels("vfio::a_nic")), (vec![GENERIC_KERNEL], vec![GENERIC_KERNEL]));
        assert_eq!((kernels("sriov::a::backports"), kernels("sriov::a")), (vec![BACKPORTS], vec![]));
        assert!(Test::new("a_test", String::new(), Path::new("/t/nics-1")).is_err());
    }

    #[test]
    fn a_path_is_one_word_whatever_is_in_it() {
        assert_eq!(quote(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
