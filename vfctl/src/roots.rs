//! The folders of the guest that the channel is found in, so that tests can replace them.

use std::path::{Path, PathBuf};

/// Folders in which the guest's kernel shows devices, and in which locks are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// Mount point of sysfs.
    pub sys: PathBuf,
    /// Folder of device nodes.
    pub dev: PathBuf,
    /// Folder of the lock `vfctl.lock`. Only root may write to it, because who holds the lock keeps all others out.
    pub run: PathBuf,
}

impl Default for Roots {
    /// The folders of a running system.
    fn default() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), run: "/run".into() }
    }
}

impl Roots {
    /// Folders of the same names below another root, for tests.
    pub fn below(root: &Path) -> Self {
        Self { sys: root.join("sys"), dev: root.join("dev"), run: root.join("run") }
    }

    /// The folder with the directory of each PCI function, by address.
    pub(crate) fn pci_devices(&self) -> PathBuf {
        self.sys.join("bus/pci/devices")
    }

    /// The lock of the program that has the control port open.
    pub(crate) fn lock(&self) -> PathBuf {
        self.run.join("vfctl.lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_system_has_its_folders_below_the_root() {
        assert_eq!(Roots::below(Path::new("/")), Roots::default());
    }
}
