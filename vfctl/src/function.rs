//! PCI functions as the guest's kernel shows them in sysfs: PFs, their VFs, drivers and network interfaces.

use std::fs;
use std::path::{Path, PathBuf};

use crate::roots::Roots;

/// A PCI function of this guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    address: String,
    folder: PathBuf,
}

impl Function {
    /// The function at a PCI address, with or without its segment: `0000:00:03.1`, `00:03.1`. `None` if the text is no
    /// address, or there is no such function.
    pub fn at(roots: &Roots, address: &str) -> Option<Self> {
        let address = full_address(address)?;
        let folder = roots.pci_devices().join(&address);
        folder.exists().then_some(Self { address, folder })
    }

    /// The function of the network interface `name`, which the caller's network namespace has.
    pub fn of_netdev(roots: &Roots, name: &str) -> Option<Self> {
        if name.is_empty() || name.starts_with('.') || name.contains('/') {
            return None;
        }
        let device = fs::canonicalize(roots.sys.join("class/net").join(name).join("device")).ok()?;
        // A virtio device is below its function.
        let mut folders = device.ancestors().take(2).filter_map(|folder| folder.file_name()?.to_str());
        folders.find_map(|folder| Self::at(roots, folder))
    }

    /// The VF with this index of the PF of the network interface `pf`, or of the PF at the address `pf`.
    pub fn of_pf(roots: &Roots, pf: &str, index: u16) -> Option<Self> {
        let pf = Self::at(roots, pf).or_else(|| Self::of_netdev(roots, pf))?;
        Self::at(roots, &link_name(&pf.folder.join(format!("virtfn{index}")))?)
    }

    /// The function that a person means: a PCI address, a network interface, or a VF by its PF and index (`eth0/3`).
    pub fn find(roots: &Roots, text: &str) -> Option<Self> {
        match text.split_once('/') {
            Some((pf, index)) => Self::of_pf(roots, pf, index.parse().ok()?),
            None => Self::at(roots, text).or_else(|| Self::of_netdev(roots, text)),
        }
    }

    /// PCI address with its segment, `0000:00:03.1`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Folder of the function in sysfs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Network interface of the function, if its driver makes one and the caller's network namespace has it.
    pub fn netdev(&self) -> Option<String> {
        let virtio = names(&self.folder).into_iter().filter(|name| name.starts_with("virtio"));
        let mut folders = virtio.map(|name| self.folder.join(name).join("net")).chain([self.folder.join("net")]);
        folders.find_map(|folder| names(&folder).into_iter().next())
    }

    /// PCI address of the PF, if this is a VF.
    pub fn pf(&self) -> Option<String> {
        link_name(&self.folder.join("physfn"))
    }

    /// Enabled VFs of this PF with their indices, in the order of these.
    pub fn vfs(&self) -> Vec<(u16, String)> {
        let index = |name: &String| name.strip_prefix("virtfn")?.parse::<u16>().ok();
        let links = names(&self.folder).into_iter().filter_map(|name| Some((index(&name)?, name)));
        let mut vfs: Vec<_> =
            links.filter_map(|(index, name)| Some((index, link_name(&self.folder.join(name))?))).collect();
        vfs.sort();
        vfs
    }

    /// Index among the VFs of its PF, if this is a VF.
    pub fn index(&self, roots: &Roots) -> Option<u16> {
        let vfs = Self::at(roots, &self.pf()?)?.vfs();
        vfs.into_iter().find_map(|(index, vf)| (vf == self.address).then_some(index))
    }

    /// Driver that is bound to the function, such as `virtio-pci` or `vfio-pci`.
    pub fn driver(&self) -> Option<String> {
        link_name(&self.folder.join("driver"))
    }
}

/// A PCI address in the form of sysfs. Its parts are of fixed length, so that no text is a path.
pub fn full_address(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let parts: Vec<_> = text.split([':', '.']).collect();
    let (segment, rest) = match parts.as_slice() {
        [bus, device, function] => ("0000", [*bus, *device, *function]),
        [segment, bus, device, function] => (*segment, [*bus, *device, *function]),
        _ => return None,
    };
    let [bus, device, function] = rest;
    let are_hex = [segment, bus, device, function].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let full = format!("{segment}:{bus}:{device}.{function}");
    let is_same = full.ends_with(&text);
    (are_hex && is_same && [segment.len(), bus.len(), device.len(), function.len()] == [4, 2, 2, 1]).then_some(full)
}

/// The last part of the target of a link.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

/// Names in a folder, sorted. None if it is missing.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
