//! Runs the tests and summarizes their figures.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use integration::Guest;

use crate::container::Container;

/// Time that a test may take in the machine's own time: for each second of virtual time, and in addition.
const LIMITS: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(120));

/// A test, and the figures that its program prints.
pub(crate) struct Test {
    /// The name of the test in its program.
    pub name: &'static str,
    /// The figures, in the order in which they are printed.
    pub figures: &'static [&'static str],
}

/// The tests of a network.
pub(crate) const NETWORK: [Test; 4] = [
    Test { name: "bulk-out", figures: &["TCP bulk out, Mbit/s"] },
    Test { name: "bulk-in", figures: &["TCP bulk in, Mbit/s"] },
    Test { name: "requests", figures: &["TCP request/response a second", "its 99th percentile, us"] },
    Test { name: "datagrams-out", figures: &["UDP 64 bytes, Mbit/s"] },
];

/// The measurement's server on the host. It is killed when this is dropped.
pub(crate) struct Server(Child);

impl Server {
    /// Starts the server at `place`, and returns when clients can connect.
    pub(crate) fn start(place: impl AsRef<OsStr>) -> Server {
        let program = env::current_exe().unwrap().with_file_name("netbench");
        let mut child = Command::new(program).arg("server").arg(place).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Settings of a measurement.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'s> {
    /// Seconds that a test takes.
    pub seconds: f64,
    /// Number of runs of each test.
    pub runs: usize,
    /// The only test to run, or all.
    pub only: Option<&'s str>,
}

/// Runs tests in a guest.
pub(crate) struct Bench<'g> {
    /// The guest.
    pub guest: &'g mut Guest,
    /// Settings of the measurement.
    pub settings: Settings<'g>,
}

impl Bench<'_> {
    /// Runs the tests of a network between `container` and the host, and prints a table row for each figure.
    pub(crate) fn measure(&mut self, what: &str, container: &Container) {
        let (host, seconds) = (&container.host, self.settings.seconds);
        self.measure_by(what, &NETWORK, |test| container.inside(&format!("netbench client {host} {test} {seconds}")));
    }

    /// Runs `tests`, each with the guest's command for its name, and prints a table row for each figure.
    pub(crate) fn measure_by(&mut self, what: &str, tests: &[Test], command: impl Fn(&str) -> String) {
        let only = self.settings.only;
        for Test { name, figures } in tests.iter().filter(|test| only.is_none_or(|only| only == test.name)) {
            let mut values = vec![Vec::new(); figures.len()];
            let mut shares = Vec::new();
            for _ in 0..self.settings.runs {
                let before = Processor::now();
                let found = self.run(&command(name));
                shares.push(Processor::now().since(&before));
                values.iter_mut().zip(found).for_each(|(values, found)| values.push(found));
            }
            for (figure, values) in figures.iter().zip(values) {
                let [guest, kernel, user] =
                    [0, 1, 2].map(|part| Spread::of(shares.iter().map(|share| share[part]).collect()).median);
                let spread = Spread::of(values);
                println!("| {what} | {figure} | {spread} | {guest:.0} / {kernel:.0} / {user:.0} |");
            }
        }
    }

    fn run(&mut self, command: &str) -> Vec<f64> {
        let printed = self.guest.ok_within(command, LIMITS.0.mul_f64(self.settings.seconds) + LIMITS.1);
        printed.split_whitespace().map(|value| value.parse().unwrap()).collect()
    }
}

/// The median, minimum and maximum of some figures.
pub(crate) struct Spread {
    least: f64,
    median: f64,
    most: f64,
}

impl Spread {
    /// Spread of at least one figure.
    pub(crate) fn of(mut figures: Vec<f64>) -> Spread {
        figures.sort_by(f64::total_cmp);
        Spread { least: figures[0], median: figures[figures.len() / 2], most: figures[figures.len() - 1] }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = if self.most < 100.0 { 1 } else { 0 };
        write!(f, "{:.digits$} | {:.digits$} to {:.digits$}", self.median, self.least, self.most)
    }
}

/// Processor time of the first-level machine so far, in ticks: of the guest, the kernel and programs, and in total.
struct Processor([f64; 4]);

impl Processor {
    fn now() -> Processor {
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let ticks: Vec<f64> =
            stat.lines().next().unwrap().split_whitespace().skip(1).map(|ticks| ticks.parse().unwrap()).collect();
        // user nice system idle iowait irq softirq steal guest guest_nice. Guest time is included in user.
        let [user, nice, system, idle, iowait, irq, softirq, steal, guest, _] = ticks[..10] else {
            panic!("expected ten columns: {stat}");
        };
        let kernel = system + irq + softirq;
        Processor([guest, kernel, user + nice - guest, user + nice + kernel + idle + iowait + steal])
    }

    /// The shares of the guest, the kernel and programs since `before`, in percent.
    fn since(&self, before: &Processor) -> [f64; 3] {
        let all = self.0[3] - before.0[3];
        [0, 1, 2].map(|part| (self.0[part] - before.0[part]) / all * 100.0)
    }
}
