//! Paths of the lab's kernels and of the VMM under test.

use std::env;
use std::fs;
use std::path::PathBuf;

/// The Debian kernels that the guest tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Debian 12's, with the virtio drivers as modules.
    V6_1,
    /// Debian 13's, with virtio-pci built in.
    V6_12,
    /// The newest kernel of Debian 13's backports. Tests with it have `backports` in their names.
    Backports,
    /// Debian 13's generic kernel, with the drivers of Intel's NICs and their VFs. Tests with it are those of VFIO, of
    /// the X550, or have `generic` in their names.
    Generic,
    /// Debian 12's generic kernel, for the longer tests.
    Generic6_1,
    /// The newest generic kernel of Debian 13's backports. Tests of the X550 with it have `backports` in their names.
    GenericBackports,
}

/// The form of the kernel image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The uncompressed ELF file, started with PVH.
    Vmlinux,
    /// The bzImage from Debian's package.
    BzImage,
}

/// The guest's programs besides busybox. A larger initramfs boots more slowly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Userland {
    /// Nothing.
    #[default]
    Plain,
    /// The real `lspci`.
    Lspci,
    /// The modules that [`crate::Guest::load`] loads.
    Modules,
    /// The modules, and DPDK's testpmd.
    Dpdk,
    /// The modules, and programs that configure NICs: `ip`, `tc` and `bridge` of iproute2, and `ethtool`.
    NicTools,
}

impl Kernel {
    /// Folder in the lab, which is also the prefix of the release, except for backports.
    pub fn version(self) -> &'static str {
        match self {
            Kernel::V6_1 => "6.1",
            Kernel::V6_12 => "6.12",
            Kernel::Backports => "backports",
            Kernel::Generic => "generic",
            Kernel::Generic6_1 => "generic-6.1",
            Kernel::GenericBackports => "generic-backports",
        }
    }
}

/// The file for the VMM's `--kernel`.
pub fn kernel_file(kernel: Kernel, image: Image) -> PathBuf {
    let name = match image {
        Image::Vmlinux => "vmlinux",
        Image::BzImage => "bzImage",
    };
    existing(folder().join("kernels").join(kernel.version()).join(name))
}

/// The initramfs for guests that run `kernel`.
pub fn initramfs(kernel: Kernel, userland: Userland) -> PathBuf {
    let suffix = match userland {
        Userland::Plain => "",
        Userland::Lspci => "-lspci",
        Userland::Modules => "-modules",
        Userland::Dpdk => "-dpdk",
        Userland::NicTools => "-nic-tools",
    };
    existing(folder().join("images").join(format!("guest-{}{suffix}.cpio", kernel.version())))
}

/// An archive of CNI plugins and their tools, which a guest can read from a disk.
pub fn cni_programs() -> PathBuf {
    existing(folder().join("cni/programs.tar"))
}

/// An archive of the programs by which a guest governs its VFs, which a guest can read from a disk.
pub fn guest_tools() -> PathBuf {
    existing(folder().join("guest-tools.tar"))
}

/// An archive of programs of a Kubernetes node, which a guest can read from a disk.
pub fn node_programs() -> PathBuf {
    existing(folder().join("cni/node.tar"))
}

/// UEFI firmware for `--firmware`.
pub fn firmware() -> PathBuf {
    existing(folder().join("firmware/usr/share/cloudhv-efi-x86-64/CLOUDHV.fd"))
}

/// Cloud Hypervisor's own firmware, for which there is no package. Prints a line if this machine does not have it.
pub fn hypervisor_fw() -> Option<PathBuf> {
    let path = folder().join("firmware/hypervisor-fw");
    let there = path.exists();
    if !there {
        println!("not tested: hypervisor-fw is not there; docs/testing.md says where it is looked for");
    }
    there.then_some(path)
}

/// A disk that firmware boots from, with Linux 6.12. UEFI firmware, which writes to it, finds an initramfs with the
/// modules that tests load, and [`hypervisor_fw`] one with only the driver of disks. Boot a copy.
pub fn firmware_disk() -> PathBuf {
    existing(folder().join("images/uefi-6.12.raw"))
}

/// Reads the files of guests that run `kernel` into the page cache. A clock that counts instructions jumps while the
/// machine waits for its disk, which would distort a measurement.
pub fn read_into_memory(kernel: Kernel) {
    read_all(&[kernel_file(kernel, Image::Vmlinux), initramfs(kernel, Userland::Plain), vmm_binary()]);
}

/// Reads the files of guests that firmware boots into the page cache. On a busy host, the clock would jump beyond the
/// time limit of a boot.
pub(crate) fn read_firmware_into_memory() {
    read_all(&[firmware(), vmm_binary()]);
}

fn read_all(files: &[PathBuf]) {
    for file in files {
        fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// The drivers of bridges for the kernel of the nested lab's first-level machine, in load order.
pub(crate) fn container_modules() -> Vec<PathBuf> {
    // Measurements copy them to memory, in another place.
    let [fetched, copied] = ["kernels/first-level/containers", "containers"].map(|place| folder().join(place));
    let folder = if fetched.exists() { fetched } else { existing(copied) };
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut modules: Vec<_> = files.filter(|file| file.extension().is_some_and(|kind| kind == "ko")).collect();
    modules.sort();
    modules
}

/// The VMM under test.
pub fn vmm_binary() -> PathBuf {
    existing(variable("CH_BINARY"))
}

/// Further arguments of the VMM, for comparing measurements (`CH_ARGUMENTS`, separated by spaces).
pub(crate) fn vmm_arguments() -> Vec<String> {
    let arguments = env::var("CH_ARGUMENTS").unwrap_or_default();
    arguments.split_whitespace().map(str::to_string).collect()
}

/// Further parameters of guests' kernels (`CH_KERNEL_PARAMETERS`), which shorten the tests in the nested lab.
pub(crate) fn kernel_parameters() -> String {
    env::var("CH_KERNEL_PARAMETERS").unwrap_or_default()
}

/// The lab's folder, which is in the checkout.
pub(crate) fn folder() -> PathBuf {
    variable("CH_LAB")
}

fn variable(name: &str) -> PathBuf {
    let value = env::var_os(name);
    value
        .unwrap_or_else(|| panic!("{name} is not set: the lab is missing; run `cargo xtask test`, which sets it up"))
        .into()
}

fn existing(path: PathBuf) -> PathBuf {
    assert!(path.exists(), "{} is missing; run `cargo xtask test`, which fetches or builds it", path.display());
    path
}
