//! KVM's own exit counters.

use std::fs;
use std::ops::Sub;
use std::path::Path;

use crate::measure::kernel_fs::{DEBUG, mount_debugfs};

/// VM exits, over all VMs of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmExits {
    /// Exits for any reason. The kernel handles most of them.
    pub all: u64,
    /// Exits for accesses to addresses without memory, which the VMM handles.
    pub mmio: u64,
}

impl KvmExits {
    /// The exits so far.
    pub fn now() -> KvmExits {
        mount_debugfs();
        let statistic = |name: &str| -> u64 {
            let path = Path::new(DEBUG).join("kvm").join(name);
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            text.trim().parse().unwrap()
        };
        KvmExits { all: statistic("exits"), mmio: statistic("mmio_exits") }
    }
}

impl Sub for KvmExits {
    type Output = KvmExits;

    fn sub(self, earlier: KvmExits) -> KvmExits {
        KvmExits { all: self.all - earlier.all, mmio: self.mmio - earlier.mmio }
    }
}
