//! The VF in sysfs, and its interface in a namespace.

use std::path::PathBuf;

use vfctl::Roots;
use vfctl::function::Function;

use crate::error::{Code, Error, Result};
use crate::namespace::Namespace;
use crate::netlink::{Link, Netlink};
use crate::system::System;

/// Drivers that give a function to a program.
const USER_SPACE: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// A VF of this guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vf {
    /// PCI address.
    pub address: String,
    /// Name of the driver. Empty without one.
    pub driver: String,
    /// True if a program drives it: it has no interface.
    pub in_user_space: bool,
    /// Devices that may have its interface: the function itself, and a virtio device below.
    owners: Vec<String>,
}

impl Vf {
    /// The VF at a PCI address.
    ///
    /// # Errors
    ///
    /// [`Code::Device`] if there is no such VF, or it has no driver.
    pub fn find(roots: &Roots, address: &str) -> Result<Self> {
        let refusal = |why: &str| Error::new(Code::Device, format!("deviceID={address}: {why}"));
        let function = Function::at(roots, address);
        let function = function.ok_or_else(|| refusal("there is no such device; are its PF's VFs enabled?"))?;
        if function.pf().is_none() {
            return Err(refusal("not a VF; give the address of a VF"));
        }
        let driver = function.driver().ok_or_else(|| refusal("no driver; bind virtio-pci or vfio-pci to it"))?;
        Ok(Self::with(roots, address, driver))
    }

    /// The VF of an earlier ADD, which may be missing.
    pub fn of_record(roots: &Roots, address: &str) -> Self {
        let driver = Function::at(roots, address).and_then(|function| function.driver());
        Self::with(roots, address, driver.unwrap_or_default())
    }

    fn with(roots: &Roots, address: &str, driver: String) -> Self {
        let in_user_space = USER_SPACE.contains(&driver.as_str());
        Self { address: address.to_string(), driver, in_user_space, owners: owners(roots, address) }
    }

    /// The interface of the VF among those of the socket's namespace. `owner` is the name of a link's device.
    ///
    /// # Errors
    ///
    /// [`Code::Io`].
    pub fn link(&self, netlink: &Netlink, owner: fn(&Link) -> Option<String>) -> Result<Option<Link>> {
        let links = netlink.links().map_err(|error| Error::io("reading interfaces", &error))?;
        Ok(links.into_iter().find(|link| owner(link).is_some_and(|owner| self.owners.contains(&owner))))
    }
}

/// Result of [`rebind`].
#[derive(Debug)]
pub(crate) enum Rebound {
    /// The VF has a new interface in the host's namespace.
    Made(Vf),
    /// No driver can make an interface of it: the VF is gone, or a program drives it.
    Without,
    /// sysfs does not let its driver go. Nothing has changed.
    Refused(Error),
}

/// Takes the VF from its driver, which ends its interface in whatever namespace that is, with all that was made on top
/// of it, and gives it to the driver again, or to `driver` if it has none: Linux makes a new interface in the host's
/// namespace before the write returns.
///
/// # Errors
///
/// [`Code::Io`] if the driver does not take it.
pub(crate) fn rebind(system: &System<'_>, address: &str, driver: &str) -> Result<Rebound> {
    let Some(function) = Function::at(&system.roots, address) else { return Ok(Rebound::Without) };
    let now = Vf::of_record(&system.roots, address);
    let driver = if now.driver.is_empty() { driver } else { &now.driver };
    if now.in_user_space || driver.is_empty() {
        return Ok(Rebound::Without);
    }
    let write = |path: PathBuf| {
        (system.write)(&path, address).map_err(|error| Error::io(format!("{} > {}", address, path.display()), &error))
    };
    if !now.driver.is_empty()
        && let Err(error) = write(function.folder().join("driver/unbind"))
    {
        return Ok(Rebound::Refused(error));
    }
    write(system.roots.sys.join("bus/pci/drivers").join(driver).join("bind"))?;
    Ok(Rebound::Made(Vf::of_record(&system.roots, address)))
}

/// The function, and virtio devices of it.
fn owners(roots: &Roots, address: &str) -> Vec<String> {
    let folder = Function::at(roots, address).and_then(|function| std::fs::read_dir(function.folder()).ok());
    let names = folder.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with("virtio")).chain([address.to_string()]).collect()
}

/// Opens a netlink socket in a namespace.
///
/// # Errors
///
/// [`Code::Io`].
pub fn netlink_in(namespace: &Namespace) -> Result<Netlink> {
    let opened = namespace.inside(Netlink::open).and_then(|opened| opened);
    opened.map_err(|error| Error::io("opening netlink in a namespace", &error))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_vf_has_a_pf_and_a_driver() {
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots::below(folder.path());
        let devices = folder.path().join("sys/bus/pci/devices");
        for name in ["0000:01:00.0", "0000:01:00.1/virtio3", "0000:01:00.2", "0000:01:00.3"] {
            fs::create_dir_all(devices.join(name)).unwrap();
        }
        for vf in ["0000:01:00.1", "0000:01:00.2", "0000:01:00.3"] {
            symlink("../0000:01:00.0", devices.join(vf).join("physfn")).unwrap();
        }
        symlink("/x/virtio-pci", devices.join("0000:01:00.0/driver")).unwrap();
        symlink("/x/virtio-pci", devices.join("0000:01:00.1/driver")).unwrap();
        symlink("/x/vfio-pci", devices.join("0000:01:00.2/driver")).unwrap();
        let nic = Vf::find(&roots, "0000:01:00.1").unwrap();
        assert!(!nic.in_user_space);
        assert_eq!(nic.owners, ["virtio3", "0000:01:00.1"]);
        assert!(Vf::find(&roots, "0000:01:00.2").unwrap().in_user_space);
        for (address, why) in
            [("0000:01:00.0", "not a VF"), ("0000:01:00.3", "no driver"), ("0000:01:00.4", "there is no such device")]
        {
            let error = Vf::find(&roots, address).unwrap_err();
            assert!(error.is(Code::Device) && error.message.contains(why), "{error}");
        }
    }
}
