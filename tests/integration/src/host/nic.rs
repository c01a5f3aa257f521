//! NICs of this machine that tests pass through to guests, behind its IOMMU: virtio NICs, an igb with VFs, and two
//! without MSI and MSI-X.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use fixtures::LoopDevice;

use crate::guest::Guest;
use crate::vmm::Vmm;

/// The device IDs of a virtio NIC, of an igb (Intel's 82576), of Realtek's 8139, of a virtio entropy device, and of
/// QEMU's panic device, which has no interrupts.
const VIRTIO: &str = "0x1041";
const IGB: &str = "0x10c9";
const RTL8139: &str = "0x8139";
const ENTROPY: &str = "0x1044";
const PANIC: &str = "0x0011";
/// The number of the igb's network: 10.2.0.0/24.
const IGB_NETWORK: usize = 2;
/// The number of the first 8139's network.
const RTL8139_NETWORK: usize = 3;
/// The VFs of the igb.
const VFS: usize = 2;

/// A NIC of this machine, for VFIO.
#[derive(Clone, Debug)]
pub struct HostNic {
    folder: PathBuf,
    network: usize,
}

impl HostNic {
    /// The virtio NICs, with the driver vfio-pci. The NIC `n` is in the network `n`.
    pub fn virtio() -> Vec<HostNic> {
        load_modules(&["vfio-pci", "vfio_iommu_type1"]);
        let nics = devices(VIRTIO);
        assert_eq!(nics.len(), 2, "this machine has NICs for VFIO: {nics:?}");
        let of = |(network, folder)| HostNic { folder, network };
        let nics: Vec<_> = nics.into_iter().enumerate().map(of).collect();
        nics.iter().for_each(HostNic::give_to_vfio);
        nics
    }

    /// The NICs with an interrupt pin and neither MSI nor MSI-X, with the driver vfio-pci. They have no driver on this
    /// machine.
    pub fn with_pins() -> Vec<HostNic> {
        load_modules(&["vfio-pci", "vfio_iommu_type1"]);
        let nics = devices(RTL8139);
        assert_eq!(nics.len(), 2, "this machine has NICs with pins: {nics:?}");
        let nics: Vec<_> = (RTL8139_NETWORK..).zip(nics).map(|(network, folder)| HostNic { folder, network }).collect();
        nics.iter().for_each(HostNic::give_to_vfio);
        nics
    }

    /// The two functions of one device, which are in one IOMMU group and are not NICs. The first has its own driver,
    /// the second vfio-pci.
    pub fn functions_of_one_group() -> [HostNic; 2] {
        load_modules(&["vfio-pci", "vfio_iommu_type1"]);
        let functions: Vec<_> = devices(ENTROPY).into_iter().map(|folder| HostNic { folder, network: 0 }).collect();
        let [first, second] = functions.try_into().expect("this machine has a device with two functions");
        first.bind("virtio-pci");
        second.give_to_vfio();
        [first, second]
    }

    /// A device without interrupts, not a NIC, with the driver vfio-pci.
    pub fn without_interrupts() -> HostNic {
        load_modules(&["vfio-pci", "vfio_iommu_type1"]);
        let device = HostNic { folder: devices(PANIC).pop().expect("this machine has such a device"), network: 0 };
        device.give_to_vfio();
        device
    }

    /// The VFs of the igb, with the driver vfio-pci. The igb itself has its own driver, and its link is up.
    pub fn igb_vfs() -> Vec<HostNic> {
        let pf = Self::igb_with("igb");
        let interface = fs::read_dir(pf.folder.join("net")).unwrap().next().unwrap().unwrap().file_name();
        let interface = interface.to_str().unwrap();
        ip(&["link", "set", interface, "up"]);
        let number = pf.folder.join("sriov_numvfs");
        if read(&number) != VFS.to_string() {
            fs::write(&number, VFS.to_string()).unwrap();
        }
        let vf = |vf: usize| {
            ip(&["link", "set", interface, "vf", &vf.to_string(), "mac", &Self::vf_mac(vf)]);
            let folder = fs::canonicalize(pf.folder.join(format!("virtfn{vf}"))).unwrap();
            HostNic { folder, network: IGB_NETWORK }
        };
        let vfs: Vec<_> = (0..VFS).map(vf).collect();
        vfs.iter().for_each(HostNic::give_to_vfio);
        vfs
    }

    /// The MAC address of a VF of the igb, by its index.
    pub fn vf_mac(vf: usize) -> String {
        format!("52:54:00:00:20:0{vf}")
    }

    /// The igb itself, with the driver vfio-pci and without VFs.
    pub fn igb() -> HostNic {
        let pf = Self::igb_with("igb");
        fs::write(pf.folder.join("sriov_numvfs"), "0").unwrap();
        pf.give_to_vfio();
        pf
    }

    fn igb_with(driver: &str) -> HostNic {
        load_modules(&["vfio-pci", "vfio_iommu_type1", "igb"]);
        let igb = HostNic { folder: devices(IGB).pop().expect("this machine has an igb"), network: IGB_NETWORK };
        if !igb.has(driver) {
            igb.bind(driver);
        }
        igb
    }

    fn has(&self, driver: &str) -> bool {
        fs::read_link(self.folder.join("driver")).is_ok_and(|bound| bound.ends_with(driver))
    }

    /// Binds the NIC to the driver vfio-pci.
    pub fn give_to_vfio(&self) {
        self.bind("vfio-pci");
    }

    /// Makes `user` the owner of the file of its IOMMU group.
    pub fn give_to_user(&self, user: u32) {
        let group = fs::read_link(self.folder.join("iommu_group")).unwrap();
        chown(Path::new("/dev/vfio").join(group.file_name().unwrap()), Some(user), None).unwrap();
    }

    /// Binds the NIC to `driver`.
    pub fn bind(&self, driver: &str) {
        let name = self.name();
        fs::write(self.folder.join("driver_override"), driver).unwrap();
        if self.folder.join("driver").exists() {
            fs::write(self.folder.join("driver/unbind"), &name).unwrap();
        }
        fs::write("/sys/bus/pci/drivers_probe", &name).unwrap();
        assert!(self.has(driver), "{name} has {:?}", fs::read_link(self.folder.join("driver")));
    }

    /// Opens the NIC's device file, on a machine with iommufd.
    pub fn open(&self) -> OwnedFd {
        let entry = fs::read_dir(self.folder.join("vfio-dev")).unwrap().next().unwrap().unwrap().file_name();
        open(&Path::new("/dev/vfio/devices").join(entry))
    }

    /// Folder in sysfs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// PCI address, such as `0000:01:00.0`.
    pub fn name(&self) -> String {
        self.folder.file_name().unwrap().to_str().unwrap().to_string()
    }

    /// The value of `--device` with `more` after its path.
    pub fn option(&self, more: &str) -> String {
        format!("path={}{more}", self.folder.display())
    }

    /// Configures the guest's `interface`, which is this NIC, and pings the other side of its network.
    pub fn join(&self, guest: &mut Guest, interface: &str) {
        let n = self.network;
        guest.ok(&format!("ip link set {interface} up; ip addr replace 10.{n}.0.15/24 dev {interface}"));
        guest.wait_for(&format!("ping -c 1 -W 2 10.{n}.0.1"));
        guest.ok(&format!("ping -c 6 -i 0.2 -W 5 10.{n}.0.1"));
    }

    /// The shell command with which a guest that has joined sends the file `sent` and compares the echo.
    pub fn echo(&self, sent: &str) -> String {
        let n = self.network;
        format!("nc 10.{n}.0.100 7 < {sent} | head -c $(wc -c < {sent}) > /tmp/back; cmp {sent} /tmp/back")
    }

    /// The shell command with which a guest that has joined pings forever.
    pub fn flood(&self) -> String {
        format!("ping -q -i 0.01 10.{}.0.1 > /dev/null 2>&1 &", self.network)
    }
}

impl Vmm {
    /// Open and locked resources: the number of files, and the line of locked memory in the VMM's status.
    pub fn held(&self) -> (usize, String) {
        let files = fs::read_dir(format!("/proc/{}/fd", self.id())).unwrap().count();
        (files, self.status("VmLck:"))
    }

    /// Memory that the VMM has pinned through iommufd, in KiB.
    pub fn pinned(&self) -> u64 {
        self.status("VmPin:").split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The line of the VMM's status that starts with `name`.
    fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        status.lines().find(|line| line.starts_with(name)).unwrap().to_string()
    }

    /// True if the VMM has a BAR of a host device mapped.
    pub fn has_bar_mapped(&self) -> bool {
        fs::read_to_string(format!("/proc/{}/maps", self.id())).unwrap().contains("[vfio-device]")
    }
}

/// Opens an iommufd of this machine, once a NIC has been bound to VFIO.
pub fn open_iommufd() -> OwnedFd {
    open(Path::new("/dev/iommu"))
}

fn open(path: &Path) -> OwnedFd {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.unwrap_or_else(|error| panic!("{}: {error}", path.display())).into()
}

/// Loads modules of this machine's kernel, each with those it depends on.
pub(crate) fn load_modules(modules: &[&str]) {
    let lab = PathBuf::from(std::env::var_os("CH_LAB").unwrap());
    let kernel = std::env::var_os("CH_MACHINE").unwrap_or_else(|| "first-level".into());
    for module in modules {
        let folder = lab.join("kernels").join(&kernel).join("extra").join(module);
        let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files {
            // Another test may have loaded it.
            let _ = Command::new("insmod").arg(file).output();
        }
    }
}

/// A block device of this machine over `file`, with blocks of `block_size` bytes.
pub fn loop_device(file: &Path, block_size: u32) -> LoopDevice {
    if !Path::new("/dev/loop-control").exists() {
        load_modules(&["loop"]);
    }
    LoopDevice::new(file, block_size).expect("a loop device")
}

/// The folders of the PCI devices with this device ID.
fn devices(number: &str) -> Vec<PathBuf> {
    let devices = fs::read_dir("/sys/bus/pci/devices").unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = devices.filter(|path| read(&path.join("device")) == number).collect();
    found.sort();
    found
}

/// Runs the real `ip`, which supports VFs.
fn ip(arguments: &[&str]) {
    let output = Command::new("/usr/bin/ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_string()
}
