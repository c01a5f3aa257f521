//! Permissions of device files, for tests that run the VMM as another user.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// Permission bits of a device file. Dropping this restores the previous ones.
pub struct DeviceMode {
    path: &'static str,
    before: Permissions,
}

impl DeviceMode {
    /// Sets the permission bits of the device file at `path`.
    pub fn set(path: &'static str, mode: u32) -> DeviceMode {
        let before = fs::metadata(path).unwrap_or_else(|error| panic!("{path}: {error}")).permissions();
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("the test runs as root");
        DeviceMode { path, before }
    }
}

impl Drop for DeviceMode {
    fn drop(&mut self) {
        let _ = fs::set_permissions(self.path, self.before.clone());
    }
}
