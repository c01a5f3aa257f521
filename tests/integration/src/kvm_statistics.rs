//! KVM's own statistics.

use std::fs;
use std::ops::Sub;
use std::path::Path;
use std::process::Command;

const DEBUG: &str = "/sys/kernel/debug";

/// How often vCPUs left their guests, over all VMs that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmExits {
    /// For whatever reason; most are answered by the kernel.
    pub all: u64,
    /// Those for accesses to addresses that are not memory, which the VMM answers.
    pub mmio: u64,
}

impl KvmExits {
    /// The exits until now.
    pub fn now() -> KvmExits {
        if !Path::new(DEBUG).join("kvm").exists() {
            let mounted = Command::new("mount").args(["-t", "debugfs", "debugfs", DEBUG]).status();
            assert!(mounted.is_ok_and(|status| status.success()), "debugfs can be mounted");
        }
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
