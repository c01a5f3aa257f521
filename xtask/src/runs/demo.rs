//! `cargo xtask demo`: runs `tests/integration/src/bin/demo.rs` where guests can run.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::build;
use crate::checks::suite::{environment, quote};
use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::lab::images::Image;
use crate::lab::{FIRST_LEVEL_KERNEL, Lab};
use crate::machine::emulator;
use crate::machine::lab_kind::{LabKind, is_root};
use crate::progress::{Step, note, seconds};

/// Time that the demonstration may take once the lab is up.
const LIMIT: Duration = Duration::from_secs(300);
/// The guest's kernel.
const KERNEL: &str = "6.12";

/// Subject of the demonstration.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// A PF and its VFs.
    #[default]
    Sriov,
    /// VFs of two tenants on a switch.
    Switch,
}

impl Part {
    /// The program of `tests/integration/src/bin`.
    const fn program(self) -> &'static str {
        match self {
            Self::Sriov => "demo",
            Self::Switch => "demo_switch",
        }
    }

    const fn about(self) -> &'static str {
        match self {
            Self::Sriov => "boots Linux with an SR-IOV NIC, enables 8 VFs, and pings the host through each",
            Self::Switch => {
                "boots Linux without any privilege; VFs of two tenants on a switch reach their own, and no other"
            }
        }
    }
}

/// Fetches and builds missing parts and runs the demonstration. Returns true if it passed.
pub(crate) fn run(workspace: &Path, part: Part, asked: Option<LabKind>) -> Result<bool> {
    let started = Instant::now();
    let lab = Lab::open(workspace)?;
    announce(&lab, part, asked);
    lab.kernel(KERNEL, "vmlinux")?;
    lab.image(Image::GuestWithLspci, KERNEL)?;
    let (vmm, demo) = build::demonstration(workspace, part.program())?;
    let place = LabKind::decide_without_taps(asked, &lab, &vmm)?;
    let demo = environment(&lab, &vmm, None) + &quote(&demo);
    let needs_taps = part == Part::Sriov;
    let command = if needs_taps && place == LabKind::Host && !is_root() { with_passt(&lab, &demo)? } else { demo };
    let step = (place == LabKind::Nested).then(|| Step::begin("lab", "an emulated machine, in which the guest runs"));
    let mut worker = place.worker(&lab, workspace, 0)?;
    if let Some(step) = step {
        step.done();
    }
    let status = worker.run(&command, LIMIT, &mut |line| println!("{line}"));
    let status =
        status.map_err(|lost| Error::new(format!("the demonstration did not end: {}", lost.explain(LIMIT))))?;
    note("done", seconds(started.elapsed()));
    println!("{}", if status == 0 { "PASS" } else { "FAIL" });
    Ok(status == 0)
}

/// Prints what this will fetch, and the time it takes, measured on two processors.
fn announce(lab: &Lab, part: Part, asked: Option<LabKind>) {
    note("demo", part.about());
    let missing = |needed: &[(&'static str, bool)]| {
        let missing: Vec<_> = needed.iter().filter(|(_, present)| !present).map(|(what, _)| *what).collect();
        if missing.is_empty() { "nothing".to_owned() } else { missing.join(", ") }
    };
    let has_kernel = |name: &str| lab.kernel_path(name, "package").exists();
    let guest = [
        ("Debian's package lists", lab.tool_path("package").exists()),
        ("a kernel (34 MB)", has_kernel(KERNEL)),
        ("busybox and lspci (7 MB)", lab.tool_path("package").exists()),
    ];
    note("demo", format!("fetches {}; builds cloud-hypervisor: about 1 min the first time", missing(&guest)));
    let place = asked.or_else(|| LabKind::known(lab));
    if place == Some(LabKind::Host) {
        return;
    }
    let emulated = [
        ("a kernel for that (108 MB)", has_kernel(FIRST_LEVEL_KERNEL)),
        ("QEMU", apt::find_program(emulator::PROGRAM).is_some()),
    ];
    let condition = if place.is_none() { "if this machine's own KVM cannot boot a stock kernel: " } else { "" };
    note(
        "demo",
        format!("{condition}emulates a machine whose KVM can; fetches {}: about 1 min more", missing(&emulated)),
    );
}

/// The command `demo` for a user who may not create taps. It uses this machine's passt, or the lab's if that is missing
/// or too old.
fn with_passt(lab: &Lab, demo: &str) -> Result<String> {
    let own = apt::find_program("passt").filter(|passt| {
        let help = Command::new(passt).arg("--help").output();
        help.is_ok_and(|help| {
            [help.stdout, help.stderr].iter().any(|text| String::from_utf8_lossy(text).contains("--vhost-user"))
        })
    });
    let folder = match own.as_deref().and_then(Path::parent) {
        Some(folder) => folder.to_owned(),
        None => lab_passt(lab)?,
    };
    note(
        "passt",
        format!("making taps needs root: the NIC and its VFs use {} instead", folder.join("passt").display()),
    );
    Ok(format!("export PATH={}:$PATH; {demo} --passt", quote(&folder)))
}

/// The folder of a script `passt` that runs the lab's passt with its own libraries, which may differ from this
/// machine's.
fn lab_passt(lab: &Lab) -> Result<PathBuf> {
    let peers = lab.peers()?.join("usr");
    let [loader, libraries, passt] =
        ["lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu", "bin/passt"].map(|path| quote(&peers.join(path)));
    let folder = lab.folder().join("passt");
    fs::create_dir_all(&folder).context(folder.display())?;
    let script = folder.join("passt");
    let text = format!("#!/bin/sh\nexec {loader} --library-path {libraries} {passt} \"$@\"\n");
    fs::write(&script, text).context(script.display())?;
    fs::set_permissions(&script, Permissions::from_mode(0o755)).context(script.display())?;
    Ok(folder)
}
