//! I/O ports that guests accessed, from the kernel's tracing, so that no figure relies on the VMM's own counters.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::measure::kernel_fs::{TRACING, mount_tracefs};

/// The size of the kernel's buffer in KiB. An access takes some 60 bytes.
const BUFFER: u32 = 16384;

/// Traces accesses to some I/O ports that exit to KVM, by all guests, until dropped.
pub struct PortTrace {
    _private: (),
}

impl PortTrace {
    /// Starts tracing accesses to `ports`. Panics if the kernel does not support it.
    pub fn start(ports: &[u16]) -> PortTrace {
        mount_tracefs();
        let conditions: Vec<String> = ports.iter().map(|port| format!("port == {port}")).collect();
        write("buffer_size_kb", &BUFFER.to_string());
        write("trace", "");
        write("events/kvm/kvm_pio/filter", &conditions.join(" || "));
        write("events/kvm/kvm_pio/enable", "1");
        PortTrace { _private: () }
    }

    /// The number of reads and writes of each port so far.
    pub fn accesses(&self) -> BTreeMap<u16, (u64, u64)> {
        let text = fs::read_to_string(path("trace")).unwrap();
        let mut ports = BTreeMap::<u16, (u64, u64)>::new();
        for line in text.lines() {
            assert!(!line.contains("LOST"), "the kernel's trace buffer was too small: {line}");
            let Some((_, access)) = line.split_once(" kvm_pio: ") else { continue };
            let mut words = access.split(' ');
            let (direction, port) = (words.next().unwrap(), words.nth(1).unwrap());
            let counts = ports.entry(u16::from_str_radix(port.trim_start_matches("0x"), 16).unwrap()).or_default();
            if direction == "pio_read" { counts.0 += 1 } else { counts.1 += 1 }
        }
        ports
    }
}

impl Drop for PortTrace {
    fn drop(&mut self) {
        write("events/kvm/kvm_pio/enable", "0");
    }
}

fn path(file: &str) -> PathBuf {
    Path::new(TRACING).join(file)
}

/// Writes to a file of tracefs.
fn write(file: &str, text: &str) {
    fs::write(path(file), text).unwrap_or_else(|error| panic!("{file}: {error} for {text:?}"));
}
