//! VFs over vDPA devices that pin memory and use an IOMMU, like hardware: virtio NICs of the first-level machine, which
//! the driver vp_vdpa turns into vDPA devices. Debian's kernels lack the driver, so it is built here for the kernel of
//! the machine.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::build;
use crate::checks::suite::{environment, quote};
use crate::error::{Context, Error, Result};
use crate::fetch::apt::{self, output};
use crate::lab::images::Image;
use crate::lab::{GUEST_KERNELS, Lab};
use crate::machine::nested::{Clock, FirstLevel, Machine, Nics};
use crate::machine::out_of_tree::Tree;

/// The kernel's folder in the lab.
pub(crate) const KERNEL: &str = "vp-vdpa";
/// The driver's folder in the kernel's source.
const FOLDER: &str = "drivers/vdpa/virtio_pci";
/// The only file of the driver.
const DRIVER: &str = "drivers/vdpa/virtio_pci/vp_vdpa.c";
/// Time that a command may take.
const LIMIT: Duration = Duration::from_secs(3600);
/// Binds each NIC to the driver and creates a vDPA device from it. Guests' memory is pinned, which counts against a
/// limit, and a device maps a limited number of pieces of it (vhost's `max_iotlb_entries`), so huge pages are turned
/// on.
const BIND: &str = "ulimit -l unlimited; echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled; \
    for nic in /sys/bus/pci/devices/*; do \
    [ $(cat $nic/vendor):$(cat $nic/device) = 0x1af4:0x1041 ] || continue; name=${nic##*/}; \
    echo vp-vdpa > $nic/driver_override; [ ! -e $nic/driver ] || echo $name > $nic/driver/unbind; \
    echo $name > /sys/bus/pci/drivers_probe; vdpa dev add name vp$((n++)) mgmtdev pci/$name; done; ";

/// Boots a machine with `nics` such devices, every other one with a page per doorbell. Runs `command` there, or by
/// default a guest with a VF over each device. Returns the exit status.
pub(crate) fn run(lab: &Lab, workspace: &Path, nics: usize, command: Option<&str>) -> Result<i32> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    prepare(lab)?;
    // The peers' programs include `vdpa`.
    lab.peers()?;
    let command = match command {
        Some(command) => command.to_owned(),
        None => {
            for kernel in GUEST_KERNELS {
                lab.kernel(kernel, "vmlinux")?;
                lab.image(Image::Guest, kernel)?;
            }
            let (vmm, program) = (build::vmm(workspace)?, build::program(workspace, "vp_vdpa")?);
            let version = output(Command::new("qemu-system-x86_64").arg("--version"))?;
            let emulator = version.lines().next().unwrap_or_default().replace(['(', ')'], "");
            format!("{}{} {nics} '{emulator}'", environment(lab, &vmm, None), quote(&program))
        }
    };
    let kind = Machine { kernel: KERNEL, clock: Clock::Real, nics: Nics::Vdpa(nics) };
    let mut machine = FirstLevel::boot_as(lab, workspace, 6, &kind)?;
    let command = format!("{BIND}{command}");
    machine
        .run(&command, LIMIT, &mut |line| println!("{line}"))
        .map_err(|lost| Error::new(format!("the command did not end: {}", lost.explain(LIMIT))))
}

/// Fetches the kernel and builds the driver, once.
fn prepare(lab: &Lab) -> Result<()> {
    if lab.kernel_path(KERNEL, "package").exists() {
        return Ok(());
    }
    let tree = Tree::fetch(lab, KERNEL)?;
    let folder = tree.extract(&[DRIVER])?.join(FOLDER);
    fs::write(folder.join("Kbuild"), "obj-m := vp_vdpa.o\n").context(folder.display())?;
    tree.make("the driver vp_vdpa", &folder, &[])?;
    lab.unpack_kernel(KERNEL, tree.folder(), tree.names(), &[folder.join("vp_vdpa.ko")], &[])
}
