//! nfs-ganesha (Debian packages nfs-ganesha and nfs-ganesha-vfs) as a peer: one folder, exported at `/export`.

use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use impresario_workload::children::Children;

/// The protocol that it speaks, and where.
#[derive(Clone, Copy, Debug)]
pub enum Version {
    /// Version 3, which needs a portmapper: see [`portmapper`].
    Three {
        port: u16,
        mount_port: u16,
    },
    Four {
        port: u16,
    },
}

/// How long a portmapper may take until it answers, those of others included that end before.
const PORTMAPPER_PATIENCE: Duration = Duration::from_secs(120);

/// The portmapper that version 3 needs, for the network that this thread is in. One runs on a machine at a time, in whatever
/// network: waits for another measurement's to end.
pub fn portmapper(children: &mut Children, folder: &Path) -> Result<()> {
    let deadline = Instant::now() + PORTMAPPER_PATIENCE;
    let answers = || TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, 111).into(), Duration::from_secs(1)).is_ok();
    loop {
        children.start("rpcbind", Path::new("rpcbind"), &["-f".into()], &folder.join("rpcbind.log"))?;
        let ended = loop {
            if let Err(ended) = children.check() {
                break ended;
            }
            if answers() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "rpcbind does not answer");
            sleep(Duration::from_millis(20));
        };
        children.kill("rpcbind")?;
        if Instant::now() >= deadline {
            return Err(
                ended.context("of the portmapper (systemctl stop rpcbind.socket rpcbind, if the machine's own runs)")
            );
        }
        sleep(Duration::from_millis(500));
    }
}

/// Starts it with a configuration and logs in `folder`; it may take seconds until it serves.
pub fn start(children: &mut Children, folder: &Path, export: &Path, version: Version) -> Result<()> {
    let (protocol, ports) = match version {
        // It binds to every address: the portmapper that version 3 cannot do without is for the whole machine, so that this is
        // for a network namespace with nothing but loopback.
        Version::Three { port, mount_port } => {
            (3, format!("NFS_Port = {port}; MNT_Port = {mount_port}; Mount_Path_Pseudo = true;"))
        }
        Version::Four { port } => (4, format!("NFS_Port = {port}; Bind_addr = 127.0.0.1;")),
    };
    let config = format!(
        "NFS_CORE_PARAM {{ {ports} Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; \
         Protocols = {protocol}; }}\nNFSV4 {{ Graceless = true; }}\nNFS_KRB5 {{ Active_krb5 = false; }}\n\
         EXPORT {{ Export_Id = 1; Path = {}; Pseudo = /export; Tag = export; Access_Type = RW; Squash = None; \
         Protocols = {protocol}; Transports = TCP; SecType = sys; FSAL {{ Name = VFS; }} }}\n",
        export.display()
    );
    let at = |file: &str| folder.join(file).display().to_string();
    std::fs::write(folder.join("server.conf"), config).with_context(|| folder.display().to_string())?;
    let arguments =
        ["-F", "-f", &at("server.conf"), "-L", &at("server.log"), "-p", &at("server.pid")].map(String::from);
    children.start("nfs-ganesha", Path::new("ganesha.nfsd"), &arguments, &folder.join("output.log"))
}
