//! Reply to `GET /metrics`, in Prometheus' text format (version 0.0.4).
//!
//! Functions have the label `device`, the device's id (for a VF, its PF's); VFs also have `vf`, their index. A VF is
//! left out while all its counters are zero, because most VFs of a large pool are never used.

mod migration;

use std::collections::BTreeSet;
use std::fmt::{Display, Write as _};
use std::fs;
use std::time::Duration;

use pci::VfIndex;
use virtio_devices::{BackendKind, Status, VirtioPci};
use vm_api::migration::MigrationProgress;

use crate::api::info::VmState;
use crate::control::counter_texts::text_of;
use crate::control::instance::Instance;
use crate::devices::{Counted, Plugged};

/// All states, with a time series each.
const STATES: [VmState; 4] = [VmState::Created, VmState::Running, VmState::Paused, VmState::Shutdown];

/// Metrics of this process.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Process {
    /// Time since the start.
    pub uptime: Duration,
    /// Events that could not be written.
    pub events_dropped: u64,
    /// Lines of the log that could not be written.
    pub log_lines_lost: u64,
    /// Open file descriptors; `None` without /proc.
    pub open_fds: Option<u64>,
    /// Threads; `None` without /proc.
    pub threads: Option<u64>,
    /// Resident memory in bytes, including the guest's; `None` without /proc.
    pub resident: Option<u64>,
    /// Processor time of all threads so far, including the guest's.
    pub cpu: Duration,
}

impl Process {
    /// Collects the metrics of this process.
    pub(super) fn this(uptime: Duration, events_dropped: u64) -> Self {
        let entries = |path| fs::read_dir(path).ok().map(|entries| entries.count() as u64);
        Self {
            uptime,
            events_dropped,
            log_lines_lost: 0,
            // Reading the folder opens one descriptor itself.
            open_fds: entries("/proc/self/fd").map(|count| count.saturating_sub(1)),
            threads: entries("/proc/self/task"),
            resident: resident(),
            cpu: cpu_time(),
        }
    }
}

/// Length in milliseconds of a tick in the kernel's files, on every architecture (`USER_HZ`).
const TICK: u64 = 10;

/// Processor time of this process so far; 0 without /proc. A clock would need `prctl` at its first use, which the
/// system call filter refuses.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may have blanks. Fields 14 and 15 are the ticks in user and kernel mode, field 3 is the
    // first after the name.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).fold(0, u64::saturating_add);
    Duration::from_millis(ticks.saturating_mul(TICK))
}

/// Returns VmRSS in bytes; the kernel reports KiB.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// All metrics of this process and its VM.
pub(super) fn metrics(process: &Process, instance: Option<&Instance>, migration: Option<&MigrationProgress>) -> String {
    let devices = || instance.and_then(Instance::vm).into_iter().flat_map(|vm| vm.devices().iter());
    let functions: Vec<_> = devices().flat_map(functions).collect();
    let mut text = Text::default();
    text.process(process);
    text.state(instance.map(Instance::state));
    let help = "Reboots since the VM was created, by its guest or by a client.";
    text.one("cloud_hypervisor_vm_reboots_total", "counter", help, instance.map_or(0, Instance::reboot_count));
    migration.into_iter().for_each(|progress| text.migration(progress));
    text.pools(&devices().filter_map(pool).collect::<Vec<_>>());
    text.functions(&functions);
    text.uplinks(&devices().filter_map(uplink).collect::<Vec<_>>());
    text.0
}

/// VFs of a PF.
struct Pool {
    labels: Vec<(&'static str, String)>,
    reserved: u16,
    enabled: u16,
}

fn pool(plugged: &Plugged) -> Option<Pool> {
    let reserved = plugged.placement().vfs?.total_vfs;
    let status = plugged.slot().with(|device| device.sriov_status())??;
    Some(Pool { labels: labels(&plugged.plan().id, None), reserved, enabled: status.num_visible() })
}

/// Kind of device whose counters an uplink has, too.
const NET: &str = "net";

/// Uplink of a PF's switch.
struct Uplink {
    labels: Vec<(&'static str, String)>,
    up: bool,
    /// True while it is deleted, and the number of deletions.
    lost: (bool, u64),
    counters: Vec<(&'static str, u64)>,
}

/// Uplink counters that are present even if zero. Most others count events that only functions have.
const UPLINK_COUNTERS: [&str; 4] = ["rx_frames", "rx_bytes", "tx_frames", "tx_bytes"];

fn uplink(plugged: &Plugged) -> Option<Uplink> {
    let switch = plugged.switch()?;
    let counters = switch.uplink_counters()?;
    let counters = counters.iter().filter(|(name, value)| *value != 0 || UPLINK_COUNTERS.contains(name)).collect();
    let lost = (switch.uplink_gone(), switch.uplink_losses()?);
    Some(Uplink { labels: labels(&plugged.plan().id, None), up: switch.uplink_up()?, lost, counters })
}

/// Metrics of a function.
struct Function {
    labels: Vec<(&'static str, String)>,
    driver_up: bool,
    /// True while the function needs a reset by its driver.
    needs_reset: bool,
    /// True while the link is up; `None` if it has no link.
    link_up: Option<bool>,
    /// True while the host has set its own tap down; `None` without one.
    tap_down: Option<bool>,
    /// True while the backend is disconnected, and the number of disconnects; `None` if it cannot disconnect.
    lost: Option<(bool, u64)>,
    /// Device kind in metric names.
    kind: &'static str,
    counters: Vec<(&'static str, u64)>,
}

/// Functions of a device, its own first.
fn functions(plugged: &Plugged) -> Vec<Function> {
    let Counted { kind, functions, latencies: _ } = plugged.counted();
    let id = &plugged.plan().id;
    let look = |device: &mut dyn VirtioPci| {
        let vfs = std::iter::once(None).chain((0..=u16::MAX).map(VfIndex).map(Some));
        let is = |device: &dyn VirtioPci, vf, bit| {
            device.function_status(vf).is_some_and(|status| status.driver.contains(bit))
        };
        let function = |(vf, counters): (Option<VfIndex>, Vec<_>)| Function {
            labels: labels(id, vf),
            driver_up: is(device, vf, Status::DRIVER_OK),
            needs_reset: is(device, vf, Status::DEVICE_NEEDS_RESET),
            link_up: device.host_nic(vf).map(|port| port.link_up()),
            tap_down: device
                .host_nic(vf)
                .filter(|port| port.backend_kind() == BackendKind::Tap)
                .map(|port| port.tap_down()),
            lost: device
                .host_nic(vf)
                .filter(|port| !matches!(port.backend_kind(), BackendKind::Switch | BackendKind::Absent))
                .map(|port| (port.backend_lost(), port.backend_losses())),
            kind,
            counters: if vf.is_some() && counters.iter().all(|(_, value)| *value == 0) { Vec::new() } else { counters },
        };
        vfs.zip(functions).map(function).collect()
    };
    plugged.slot().with(look).unwrap_or_default()
}

fn labels(device: &str, vf: Option<VfIndex>) -> Vec<(&'static str, String)> {
    let vf = vf.map(|vf| ("vf", vf.0.to_string()));
    [("device", device.to_string())].into_iter().chain(vf).collect()
}

/// Text of the reply.
#[derive(Default)]
struct Text(String);

impl Text {
    fn process(&mut self, process: &Process) {
        let Process { uptime, events_dropped, log_lines_lost, open_fds, threads, resident, cpu } = *process;
        self.one(
            "cloud_hypervisor_uptime_seconds",
            "gauge",
            "Seconds since the program started.",
            uptime.as_secs_f64(),
        );
        let help = "Processor time of all threads, in seconds, including the guest's vCPUs.";
        self.one("cloud_hypervisor_cpu_seconds_total", "counter", help, cpu.as_secs_f64());
        let help = "Events dropped because the reader of --event-monitor is too slow, or gone.";
        self.one("cloud_hypervisor_events_dropped_total", "counter", help, events_dropped);
        let help = "Lines of the log that were not written: the disk is full, or the pipe of --log-file is not read.";
        self.one("cloud_hypervisor_log_lines_lost_total", "counter", help, log_lines_lost);
        let gauges = [
            ("process_open_fds", "Open file descriptors.", open_fds),
            ("process_threads", "Threads.", threads),
            ("process_resident_memory_bytes", "Resident memory, including the guest's.", resident),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                self.one(name, "gauge", help, value);
            }
        }
    }

    fn state(&mut self, state: Option<VmState>) {
        let name = "cloud_hypervisor_vm_state";
        self.family(name, "gauge", "1 for the state of the VM; 0 everywhere without one.");
        for known in STATES {
            self.sample(name, &[("state", format!("{known:?}"))], u8::from(state == Some(known)));
        }
    }

    fn pools(&mut self, pools: &[Pool]) {
        let name = "cloud_hypervisor_sriov_vfs_reserved";
        self.family(name, "gauge", "VFs that a physical function reserves (TotalVFs).");
        pools.iter().for_each(|pool| self.sample(name, &pool.labels, pool.reserved));
        let name = "cloud_hypervisor_sriov_vfs_enabled";
        self.family(name, "gauge", "VFs that the guest has enabled.");
        pools.iter().for_each(|pool| self.sample(name, &pool.labels, pool.enabled));
    }

    fn functions(&mut self, functions: &[Function]) {
        let name = "cloud_hypervisor_driver_up";
        self.family(name, "gauge", "1 while a guest driver runs the function.");
        functions.iter().for_each(|function| self.sample(name, &function.labels, u8::from(function.driver_up)));
        let name = "cloud_hypervisor_needs_reset";
        self.family(name, "gauge", "1 while the function is stopped until its driver resets it (DEVICE_NEEDS_RESET).");
        functions.iter().for_each(|function| self.sample(name, &function.labels, u8::from(function.needs_reset)));
        let name = "cloud_hypervisor_link_up";
        self.family(name, "gauge", "1 while the link of the network function is up.");
        for function in functions {
            if let Some(up) = function.link_up {
                self.sample(name, &function.labels, u8::from(up));
            }
        }
        self.backends(functions);
        let kinds: BTreeSet<_> = functions.iter().map(|function| function.kind).collect();
        for kind in kinds {
            let functions: Vec<_> = functions.iter().filter(|function| function.kind == kind).collect();
            let counters = functions.iter().flat_map(|function| &function.counters).map(|(counter, _)| *counter);
            for counter in counters.collect::<BTreeSet<_>>() {
                let name = format!("cloud_hypervisor_{kind}_{counter}_total");
                self.family(&name, "counter", text_of(kind, counter));
                for function in &functions {
                    if let Some((_, value)) = function.counters.iter().find(|(other, _)| *other == counter) {
                        self.sample(&name, &function.labels, value);
                    }
                }
            }
        }
    }

    fn uplinks(&mut self, uplinks: &[Uplink]) {
        let name = "cloud_hypervisor_uplink_up";
        self.family(name, "gauge", "1 while the uplink of the physical function's switch is up.");
        uplinks.iter().for_each(|uplink| self.sample(name, &uplink.labels, u8::from(uplink.up)));
        let name = "cloud_hypervisor_uplink_lost";
        self.family(name, "gauge", "1 while the uplink of the physical function's switch is deleted.");
        uplinks.iter().for_each(|uplink| self.sample(name, &uplink.labels, u8::from(uplink.lost.0)));
        let name = "cloud_hypervisor_uplink_losses_total";
        self.family(name, "counter", "Times the uplink of the switch was deleted while a driver ran.");
        uplinks.iter().for_each(|uplink| self.sample(name, &uplink.labels, uplink.lost.1));
        let counters = uplinks.iter().flat_map(|uplink| &uplink.counters).map(|(counter, _)| *counter);
        for counter in counters.collect::<BTreeSet<_>>() {
            let name = format!("cloud_hypervisor_uplink_{counter}_total");
            self.family(&name, "counter", text_of(NET, counter));
            for uplink in uplinks {
                if let Some((_, value)) = uplink.counters.iter().find(|(other, _)| *other == counter) {
                    self.sample(&name, &uplink.labels, value);
                }
            }
        }
    }

    fn backends(&mut self, functions: &[Function]) {
        let name = "cloud_hypervisor_tap_down";
        self.family(name, "gauge", "1 while the host has set the network function's own tap down.");
        for function in functions {
            if let Some(down) = function.tap_down {
                self.sample(name, &function.labels, u8::from(down));
            }
        }
        let lost = || functions.iter().filter_map(|function| Some((&function.labels, function.lost?)));
        let name = "cloud_hypervisor_backend_lost";
        self.family(
            name,
            "gauge",
            "1 while the backend of the network function is lost: a tap, process, device or kernel worker.",
        );
        lost().for_each(|(labels, (lost, _))| self.sample(name, labels, u8::from(lost)));
        let name = "cloud_hypervisor_backend_losses_total";
        self.family(name, "counter", "Times the backend of the network function was lost since the device was added.");
        lost().for_each(|(labels, (_, losses))| self.sample(name, labels, losses));
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    /// Starts a family of samples.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        self.0.push_str(name);
        for (n, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if n == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;

    /// Parses the samples by name and labels. Checks that each family is contiguous and announced once.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let (mut families, mut samples) = (HashSet::new(), BTreeMap::new());
        let mut family = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(families.insert(name) && ["gauge", "counter"].contains(&kind), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                family = name;
            } else if !line.starts_with("# HELP ") {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert_eq!(series.split('{').next(), Some(family), "{line}");
                assert!(samples.insert(series.to_string(), value.parse().unwrap()).is_none(), "{line}");
            }
        }
        assert!(text.ends_with('\n'));
        samples
    }

    fn function(vf: Option<u16>, counters: &[(&'static str, u64)]) -> Function {
        let labels = labels("pf0", vf.map(VfIndex));
        let (driver_up, lost) = (vf.is_none(), vf.map(|vf| (vf == 3, 2)));
        let (needs_reset, link_up, tap_down) = (vf == Some(3), Some(true), vf.map(|vf| vf == 3));
        let counters = counters.to_vec();
        Function { labels, driver_up, needs_reset, link_up, tap_down, lost, kind: "net", counters }
    }

    #[test]
    fn counters_of_a_pf_and_its_vfs_differ_by_labels() {
        let mut text = Text::default();
        let counters = |n| [("rx_bytes", n), ("tx_bad_vlan", 10 * n)];
        let known = [("control_commands", 5), ("rx_bytes", 2), ("tx_bad_vlan", 20)];
        text.functions(&[function(None, &counters(1)), function(Some(0), &[]), function(Some(3), &known)]);
        let samples = parse(&text.0);
        assert_eq!(samples[r#"cloud_hypervisor_net_rx_bytes_total{device="pf0"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_net_rx_bytes_total{device="pf0",vf="3"}"#], 2.0);
        assert_eq!(samples[r#"cloud_hypervisor_net_tx_bad_vlan_total{device="pf0",vf="3"}"#], 20.0);
        assert_eq!(samples[r#"cloud_hypervisor_driver_up{device="pf0"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_driver_up{device="pf0",vf="0"}"#], 0.0);
        assert_eq!(samples[r#"cloud_hypervisor_link_up{device="pf0",vf="0"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_needs_reset{device="pf0",vf="3"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_needs_reset{device="pf0",vf="0"}"#], 0.0);
        assert!(!samples.contains_key(r#"cloud_hypervisor_net_rx_bytes_total{device="pf0",vf="0"}"#));
        assert_eq!(samples[r#"cloud_hypervisor_net_control_commands_total{device="pf0",vf="3"}"#], 5.0);
        assert!(!samples.contains_key(r#"cloud_hypervisor_net_control_commands_total{device="pf0"}"#));
        assert_eq!(samples[r#"cloud_hypervisor_tap_down{device="pf0",vf="3"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_backend_lost{device="pf0",vf="3"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_backend_lost{device="pf0",vf="0"}"#], 0.0);
        assert_eq!(samples[r#"cloud_hypervisor_backend_losses_total{device="pf0",vf="0"}"#], 2.0);
        assert!(!samples.contains_key(r#"cloud_hypervisor_backend_lost{device="pf0"}"#));
    }

    #[test]
    fn an_uplink_has_its_counters_next_to_those_of_its_pf() {
        let mut text = Text::default();
        let uplink = |id, up: bool, counters: &[_]| {
            let lost = (!up, u64::from(!up));
            Uplink { labels: labels(id, None), up, lost, counters: counters.to_vec() }
        };
        let some = [("rx_bytes", 7), ("rx_unknown", 1)];
        text.functions(&[function(None, &[("rx_bytes", 3)])]);
        text.uplinks(&[uplink("pf0", true, &some), uplink("pf1", false, &[("rx_bytes", 0)])]);
        let samples = parse(&text.0);
        assert_eq!(samples[r#"cloud_hypervisor_net_rx_bytes_total{device="pf0"}"#], 3.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_rx_bytes_total{device="pf0"}"#], 7.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_rx_bytes_total{device="pf1"}"#], 0.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_rx_unknown_total{device="pf0"}"#], 1.0);
        assert!(!samples.contains_key(r#"cloud_hypervisor_uplink_rx_unknown_total{device="pf1"}"#));
        assert_eq!(samples[r#"cloud_hypervisor_uplink_up{device="pf0"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_up{device="pf1"}"#], 0.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_lost{device="pf1"}"#], 1.0);
        assert_eq!(samples[r#"cloud_hypervisor_uplink_losses_total{device="pf1"}"#], 1.0);
    }

    #[test]
    fn a_device_of_any_kind_has_its_counters() {
        let mut text = Text::default();
        let device = |kind, id| Function { kind, labels: labels(id, None), ..function(None, &[("bytes", 1)]) };
        text.functions(&[device("console", "a"), device("rng", "b"), device("console", "c"), device("other", "d")]);
        let samples = parse(&text.0);
        for (kind, id) in [("console", "a"), ("rng", "b"), ("console", "c"), ("other", "d")] {
            assert_eq!(samples[&format!(r#"cloud_hypervisor_{kind}_bytes_total{{device="{id}"}}"#)], 1.0);
        }
    }

    #[test]
    fn a_program_without_a_vm_has_metrics() {
        let samples = parse(&metrics(
            &Process {
                log_lines_lost: 3,
                cpu: Duration::from_millis(2250),
                ..Process::this(Duration::from_millis(1500), 7)
            },
            None,
            None,
        ));
        assert_eq!(samples["cloud_hypervisor_uptime_seconds"], 1.5);
        assert_eq!(samples["cloud_hypervisor_cpu_seconds_total"], 2.25);
        assert_eq!(samples["cloud_hypervisor_events_dropped_total"], 7.0);
        assert_eq!(samples["cloud_hypervisor_log_lines_lost_total"], 3.0);
        assert_eq!(samples[r#"cloud_hypervisor_vm_state{state="Running"}"#], 0.0);
        for some in ["process_open_fds", "process_threads", "process_resident_memory_bytes"] {
            assert!(samples[some] >= 1.0, "{some}");
        }
    }

    #[test]
    fn processor_time_grows_with_the_work_of_any_thread() {
        let before = cpu_time();
        std::thread::spawn(move || while cpu_time() < before + Duration::from_millis(20) {}).join().unwrap();
        assert!(Process::this(Duration::ZERO, 0).cpu >= before + Duration::from_millis(20));
    }

    #[test]
    fn a_label_can_be_any_text() {
        let mut text = Text::default();
        text.sample("x", &[("device", "a\"b\\c\nd".to_string())], 1);
        assert_eq!(text.0, "x{device=\"a\\\"b\\\\c\\nd\"} 1\n");
    }
}
