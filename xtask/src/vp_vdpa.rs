//! VFs over vDPA devices that pin memory and go through an IOMMU, as hardware's do: virtio NICs of the first-level
//! machine, which the driver vp_vdpa turns into vDPA devices. Debian's kernels lack the driver, so it is built here for
//! the kernel that the machine runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::apt::{self, Apt, output};
use crate::build;
use crate::error::{Context, Error, Result};
use crate::images::Image;
use crate::lab::{GUEST_KERNELS, Lab};
use crate::nested::{Clock, FirstLevel, Machine, Nics};
use crate::progress::Step;
use crate::suite::{environment, quote};

/// The kernel's folder in the lab.
pub(crate) const KERNEL: &str = "vp-vdpa";
/// The package with the kernel's source.
const SOURCE: &str = "linux-source-6.12";
/// The end of that package's versions that are built for the Debian release whose compilers this machine has.
const BUILT_FOR: &str = "~deb12";
/// The driver's only file.
const DRIVER: &str = "drivers/vdpa/virtio_pci/vp_vdpa.c";
/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(3600);
/// Binds each NIC to the driver and makes a vDPA device of it. Guests' memory is pinned, which counts against a limit,
/// and a device maps a limited number of pieces of it (vhost's `max_iotlb_entries`), so huge pages are turned on.
const BIND: &str = "ulimit -l unlimited; echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled; \
    for nic in /sys/bus/pci/devices/*; do \
    [ $(cat $nic/vendor):$(cat $nic/device) = 0x1af4:0x1041 ] || continue; name=${nic##*/}; \
    echo vp-vdpa > $nic/driver_override; [ ! -e $nic/driver ] || echo $name > $nic/driver/unbind; \
    echo $name > /sys/bus/pci/drivers_probe; vdpa dev add name vp$((n++)) mgmtdev pci/$name; done; ";

/// Boots a machine with `nics` such devices, every other one with a page per doorbell. Runs `command` there, or else a
/// guest with a VF over each device. Returns the exit status.
pub(crate) fn run(lab: &Lab, workspace: &Path, nics: usize, command: Option<&str>) -> Result<i32> {
    apt::install_missing(&[
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("gcc", "gcc"),
        ("make", "make"),
        ("xz", "xz-utils"),
    ])?;
    prepare(lab)?;
    // The programs of others include `vdpa`.
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
    let record = lab.kernel_path(KERNEL, "package");
    if record.exists() {
        return Ok(());
    }
    let mut apt = Apt::new(&lab.folder().join("apt"))?;
    let version = apt.version(SOURCE, BUILT_FOR)?;
    let upstream = version.split('-').next().unwrap_or_default();
    let release = format!("{upstream}+deb12");
    let folder = lab.folder().join("unpacked-vp-vdpa");
    let _ = fs::remove_dir_all(&folder);
    let packages = [
        format!("linux-image-{release}-amd64"),
        format!("linux-headers-{release}-amd64"),
        format!("linux-headers-{release}-common"),
        format!("linux-kbuild-{release}"),
        format!("{SOURCE}={version}"),
    ];
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    let names = apt.unpack(&format!("Linux {release}, its headers and its source"), &packages, &folder)?;
    let step = Step::begin("build", "the driver vp_vdpa");
    let driver = build(&folder, &folder.join(format!("usr/src/linux-headers-{release}-amd64")))?;
    step.done();
    lab.unpack_kernel(KERNEL, &folder, &names, Some(&driver))?;
    let _ = fs::remove_dir_all(&folder);
    Ok(())
}

/// Builds the driver against `headers`. Returns the module.
fn build(unpacked: &Path, headers: &Path) -> Result<PathBuf> {
    let makefile = headers.join("Makefile");
    let text = fs::read_to_string(&makefile).context(makefile.display())?;
    // The packages expect to be installed.
    let text = text.replace("/usr/src/", &format!("{}/", unpacked.join("usr/src").display()));
    fs::write(&makefile, text).context(makefile.display())?;
    let source = unpacked.join("usr/src").join(format!("{SOURCE}.tar.xz"));
    let folder = unpacked.join("module");
    fs::create_dir_all(&folder).context(folder.display())?;
    // DRIVER lies below the archive's one folder.
    let mut extract = Command::new("tar");
    extract.arg("-xJf").arg(source).arg("-C").arg(&folder).args(["--strip-components=4", "--wildcards"]);
    output(extract.arg(format!("*/{DRIVER}")))?;
    fs::write(folder.join("Kbuild"), "obj-m := vp_vdpa.o\n").context(folder.display())?;
    let mut make = Command::new("make");
    make.arg("-C").arg(headers).arg(format!("M={}", folder.display()));
    // Type information is not needed, and takes another tool.
    output(make.args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]))?;
    Ok(folder.join("vp_vdpa.ko"))
}
