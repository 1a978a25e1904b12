// swift-tools-version:5.5
// The C interface of edgespec's native operators as a module: `import CEdgespec`. The library itself is built by CMake
// and installed, or named by -L. There is no wrapper in Swift.
import PackageDescription

let package = Package(
  name: "CEdgespec",
  products: [.library(name: "CEdgespec", targets: ["CEdgespec"])],
  targets: [.systemLibrary(name: "CEdgespec", pkgConfig: "edgespec")]
)
