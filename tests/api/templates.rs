//! Snapshots whose files an orchestrator changes, and templates whose memory is in a named file.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::rig::vmm::{Vmm, wait_for};
use crate::snapshot::{config, dots, folder, names, paused, redirect, restore, said, snapshot};

/// Changes the saved configuration, as an orchestrator does.
pub(crate) fn edit(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn changes_by_kata_to_the_configuration_are_applied() {
    for zones in [false, true] {
        let source = Vmm::start();
        let ram = source.files.sparse("ram", 64 << 20);
        let mut config = config(&source);
        config["vsock"] = json!({"cid": 3, "socket": source.files.path("vsock")});
        config["memory"] = if zones {
            json!({"size": 0, "zones": [{"id": "mem0", "size": 64 << 20, "file": ram, "shared": true}]})
        } else {
            json!({"size": 64 << 20, "shared": true})
        };
        let mut client = paused(&source, &config);
        let (path, url) = folder(&source, "saved");
        snapshot(&mut client, &url).expect(204);
        let contents = fs::read(&ram).unwrap();
        for (mode, is_private) in [("Copy", false), ("Copy", true), ("Auto", true)] {
            // A clone that shares the memory would change it.
            if zones && !is_private {
                continue;
            }
            let target = Vmm::start();
            redirect(&path, &target);
            let socket = target.files.path("vsock");
            edit(&path, |config| {
                config["vsock"]["socket"] = json!(socket);
                let memory = &mut config["memory"];
                let memory = if zones { &mut memory["zones"][0] } else { memory };
                memory["shared"] = json!(!is_private);
            });
            let mut client = target.client();
            restore(&mut client, &url, mode).expect(204);
            assert!(socket.exists(), "{mode}");
            let memory = client.get("vm.info").expect(200)["config"]["memory"].clone();
            let memory = if zones { &memory["zones"][0] } else { &memory };
            assert_eq!(memory["shared"], !is_private, "{mode}");
            client.put("vm.resume").expect(204);
            wait_for("the guest", || dots(&target) > 2);
            assert!(fs::read(&ram).unwrap() == contents, "{mode}: the clone writes to the memory of its template");
        }
        let before = dots(&source);
        client.put("vm.resume").expect(204);
        wait_for("the source", || dots(&source) > before + 1);
    }
}

#[test]
fn clones_share_the_file_of_their_template_and_copy_nothing() {
    let template = Vmm::start();
    let ram = template.files.sparse("ram", 64 << 20);
    let mut config = config(&template);
    config["memory"] = json!({"size": 0, "zones": [{"id": "mem0", "size": 64 << 20, "file": ram, "shared": true}]});
    let mut client = paused(&template, &config);
    let (saved, url) = folder(&template, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    assert_eq!(names(&saved), ["config.json", "state.json"]);
    let contents = fs::read(&ram).unwrap();
    let clones = [Vmm::start(), Vmm::start()];
    let mut clients = Vec::new();
    for clone in &clones {
        let (path, url) = folder(clone, "clone");
        for name in names(&saved) {
            fs::copy(saved.join(&name), path.join(&name)).unwrap();
        }
        redirect(&path, clone);
        edit(&path, |config| config["memory"]["zones"][0]["shared"] = json!(false));
        let mut client = clone.client();
        restore(&mut client, &url, "Auto").expect(204);
        client.put("vm.resume").expect(204);
        clients.push(client);
    }
    for (clone, client) in clones.iter().zip(&mut clients) {
        wait_for("a clone", || dots(clone) > 2);
        // Its memory is private now, and its snapshot contains it.
        client.put("vm.pause").expect(204);
        let (path, url) = folder(clone, "own");
        snapshot(client, &url).expect(204);
        assert_eq!(names(&path), ["config.json", "memory-ranges", "state.json"]);
    }
    assert!(fs::read(&ram).unwrap() == contents, "a clone writes to the memory of its template");
    let target = Vmm::start();
    edit(&saved, |config| _ = config["memory"]["zones"][0].as_object_mut().unwrap().remove("file"));
    let refused = restore(&mut target.client(), &url, "Auto");
    assert_eq!(refused.status, 400, "{refused:?}");
    assert!(said(&refused).contains("the snapshot leaves the memory from 0x0 on to a zone's file"), "{refused:?}");
}

#[test]
fn a_state_that_a_json_library_wrote_again_is_restored() {
    fn through_doubles(value: &mut Value) {
        match value {
            Value::Array(all) => all.iter_mut().for_each(through_doubles),
            Value::Object(all) => all.values_mut().for_each(through_doubles),
            Value::Number(number) => {
                let double = number.as_f64().unwrap();
                assert!(double.fract() == 0.0 && double.abs() < 1e21, "{double} has another form there");
                *value = serde_json::from_str(&format!("{double:.0}")).unwrap();
            }
            _ => {}
        }
    }
    let source = Vmm::start();
    let mut client = paused(&source, &config(&source));
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    let state = path.join("state.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    through_doubles(&mut value);
    fs::write(&state, serde_json::to_vec_pretty(&value).unwrap()).unwrap();
    let target = Vmm::start();
    redirect(&path, &target);
    let mut client = target.client();
    restore(&mut client, &url, "Copy").expect(204);
    client.put("vm.resume").expect(204);
    wait_for("the guest", || dots(&target) > 2);
}
