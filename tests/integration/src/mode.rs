//! Who may open a device, for tests of users who may not.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// Permission bits that a device has until this is dropped.
pub struct DeviceMode {
    path: &'static str,
    before: Permissions,
}

impl DeviceMode {
    /// Sets the permission bits of the device at `path`.
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
