//! Traces of KVM: the calls with which a VMM adds and removes KVM objects, and the guest's exits. They come from the
//! kernel, so that no figure relies on the VMM's own counters.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Read};
use std::ops::Sub;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::measure::kernel_fs::{TRACING, mount_tracefs};

/// The kernel functions behind `KVM_IRQFD`, `KVM_IOEVENTFD`, `KVM_SET_GSI_ROUTING` and `KVM_SET_USER_MEMORY_REGION`,
/// and the places of the counted values in their arguments (`linux/kvm.h`).
const PROBES: [&str; 4] = [
    "p:lab/irqfd kvm_irqfd fd=+0(%si):u32 gsi=+4(%si):u32 flags=+8(%si):u32",
    "p:lab/ioeventfd kvm_ioeventfd addr=+8(%si):u64 fd=+20(%si):u32 flags=+24(%si):u32",
    "p:lab/routes kvm_set_irq_routing count=%dx:u32",
    "p:lab/slot __kvm_set_memory_region slot=+0(%si):u32 size=+16(%si):u64",
];
const IRQFD_DEASSIGN: u64 = 1 << 0;
const IOEVENTFD_DEASSIGN: u64 = 1 << 2;

/// The guest-physical addresses of configuration space.
const ECAM: std::ops::Range<u64> = 0xe800_0000..0xf800_0000;

/// The number of KVM objects of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmObjects {
    /// Addresses at which a write signals an eventfd.
    pub ioeventfds: usize,
    /// Eventfds that raise an interrupt.
    pub irqfds: usize,
    /// Entries of the interrupt routing table, including those for the interrupt controllers' pins.
    pub routes: u64,
    /// Memory slots, including KVM's own.
    pub slots: usize,
}

/// Events since the trace started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmEvents {
    /// Reads of configuration space that caused an exit.
    pub config_reads: u64,
    /// Writes of configuration space; each causes an exit.
    pub config_writes: u64,
    /// Calls of `KVM_IRQFD`, to attach or detach.
    pub irqfd_calls: u64,
    /// Calls of `KVM_IOEVENTFD`, to attach or detach.
    pub ioeventfd_calls: u64,
    /// Calls of `KVM_SET_GSI_ROUTING`.
    pub route_calls: u64,
}

impl Sub for KvmEvents {
    type Output = KvmEvents;

    fn sub(self, earlier: KvmEvents) -> KvmEvents {
        KvmEvents {
            config_reads: self.config_reads - earlier.config_reads,
            config_writes: self.config_writes - earlier.config_writes,
            irqfd_calls: self.irqfd_calls - earlier.irqfd_calls,
            ioeventfd_calls: self.ioeventfd_calls - earlier.ioeventfd_calls,
            route_calls: self.route_calls - earlier.route_calls,
        }
    }
}

/// Traces all VMs that are created until this is dropped. The counts are meaningful with one VM at a time.
pub struct KvmTrace {
    pipe: fs::File,
    partial: String,
    irqfds: BTreeSet<u64>,
    ioeventfds: BTreeSet<(u64, u64)>,
    routes: u64,
    slots: BTreeSet<u64>,
    events: KvmEvents,
}

impl KvmTrace {
    /// Starts tracing. Panics if the kernel does not support it.
    pub fn start() -> KvmTrace {
        mount_tracefs();
        write("events/lab/enable", "0", false);
        write("kprobe_events", "", false);
        for probe in PROBES {
            write("kprobe_events", probe, true);
        }
        write("buffer_size_kb", "16384", true);
        write("events/lab/enable", "1", true);
        write("events/kvm/kvm_mmio/filter", &format!("gpa >= {} && gpa < {}", ECAM.start, ECAM.end), true);
        write("events/kvm/kvm_mmio/enable", "1", true);
        let pipe = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path("trace_pipe"));
        KvmTrace {
            pipe: pipe.unwrap(),
            partial: String::new(),
            irqfds: BTreeSet::new(),
            ioeventfds: BTreeSet::new(),
            routes: 0,
            slots: BTreeSet::new(),
            events: KvmEvents::default(),
        }
    }

    /// The objects that exist now.
    pub fn objects(&mut self) -> KvmObjects {
        self.follow();
        KvmObjects {
            ioeventfds: self.ioeventfds.len(),
            irqfds: self.irqfds.len(),
            routes: self.routes,
            slots: self.slots.len(),
        }
    }

    /// The events so far.
    pub fn events(&mut self) -> KvmEvents {
        self.follow();
        self.events
    }

    /// Reads the trace since the last call.
    fn follow(&mut self) {
        let mut buffer = [0; 1 << 16];
        loop {
            match self.pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => self.partial.push_str(&String::from_utf8_lossy(&buffer[..length])),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("trace_pipe: {error}"),
            }
        }
        let text = std::mem::take(&mut self.partial);
        let end = text.rfind('\n').map_or(0, |end| end + 1);
        text[..end].lines().for_each(|line| self.line(line));
        self.partial = text[end..].to_owned();
    }

    fn line(&mut self, line: &str) {
        assert!(!line.contains("LOST"), "the kernel's trace buffer was too small: {line}");
        let field = |name: &str| -> u64 {
            let value = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {line:?}"))
        };
        let is = |event: &str| line.contains(event);
        if is(" irqfd: ") {
            self.events.irqfd_calls += 1;
            toggle(&mut self.irqfds, field("fd"), field("flags") & IRQFD_DEASSIGN == 0);
        } else if is(" ioeventfd: ") {
            self.events.ioeventfd_calls += 1;
            let key = (field("addr"), field("fd"));
            toggle(&mut self.ioeventfds, key, field("flags") & IOEVENTFD_DEASSIGN == 0);
        } else if is(" routes: ") {
            self.events.route_calls += 1;
            self.routes = field("count");
        } else if is(" slot: ") {
            toggle(&mut self.slots, field("slot"), field("size") != 0);
        } else if is(" kvm_mmio: mmio unsatisfied-read ") {
            self.events.config_reads += 1;
        } else if is(" kvm_mmio: mmio write ") {
            self.events.config_writes += 1;
        }
    }
}

impl Drop for KvmTrace {
    fn drop(&mut self) {
        write("events/kvm/kvm_mmio/enable", "0", false);
        write("events/lab/enable", "0", false);
        write("kprobe_events", "", false);
    }
}

fn toggle<T: Ord>(set: &mut BTreeSet<T>, key: T, present: bool) {
    if present {
        set.insert(key);
    } else {
        set.remove(&key);
    }
}

fn path(file: &str) -> std::path::PathBuf {
    Path::new(TRACING).join(file)
}

/// Writes to a file of tracefs. Text is appended; an empty text clears the file.
fn write(file: &str, text: &str, must: bool) {
    use std::io::Write;
    let open = fs::OpenOptions::new().write(true).append(!text.is_empty()).truncate(text.is_empty()).open(path(file));
    let done = open.and_then(|mut opened| opened.write_all(text.as_bytes()));
    assert!(done.is_ok() || !must, "{file}: {done:?} for {text:?}");
}
