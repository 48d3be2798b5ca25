//! nfs-ganesha (Debian packages nfs-ganesha and nfs-ganesha-vfs) as a peer: one folder, exported at `/export`.

use std::path::Path;

use anyhow::{Context, Result};
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

/// The portmapper that version 3 needs, for the network that this thread is in.
pub fn portmapper(children: &mut Children, folder: &Path) -> Result<()> {
    children.start("rpcbind", Path::new("rpcbind"), &["-f".into()], &folder.join("rpcbind.log"))
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
