//! The demonstration: `tests/integration/src/bin/demo.rs`, run where guests can run.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::apt;
use crate::build;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::place::{Place, is_root};
use crate::progress::{Step, note, seconds};
use crate::suite::{environment, quote};

/// How long the demonstration may take once the lab is up.
const LIMIT: Duration = Duration::from_secs(300);

/// Sets up what is needed and runs the demonstration. It tells whether it passed.
pub fn run(workspace: &Path, asked: Option<Place>) -> Result<bool> {
    let started = Instant::now();
    let lab = Lab::prepare(workspace)?;
    let binaries = build::static_binaries(workspace, false)?;
    let place = Place::decide_without_taps(asked, &lab, &binaries.vmm)?;
    let demo = environment(&lab, &binaries) + &quote(&binaries.demo);
    let command = if place == Place::Host && !is_root() { by_passt(&lab, &demo)? } else { demo };
    let step = Step::begin("lab", "a machine with a KVM that works");
    let mut worker = place.worker(&lab, workspace, 0)?;
    step.done();
    let status = worker.run(&command, LIMIT, &mut |line| println!("{line}"));
    let status =
        status.map_err(|lost| Error::new(format!("the demonstration did not end: {}", lost.explain(LIMIT))))?;
    note("done", seconds(started.elapsed()));
    println!("{}", if status == 0 { "PASS" } else { "FAIL" });
    Ok(status == 0)
}

/// The command `demo`, for a user who may not make taps: with the machine's own passt, or the lab's if that is missing or too old.
fn by_passt(lab: &Lab, demo: &str) -> Result<String> {
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
    note("passt", format!("no tap can be made without root: NICs are over {}", folder.join("passt").display()));
    Ok(format!("export PATH={}:$PATH; {demo} --passt", quote(&folder)))
}

/// The folder of a `passt` that runs the lab's with the libraries that it was built for, which need not be this machine's.
fn lab_passt(lab: &Lab) -> Result<PathBuf> {
    let peers = lab.peers().join("usr");
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
