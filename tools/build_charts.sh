#!/bin/sh
# Rebuilds src/penstock/report/charts/web/echarts.min.js from the npm packages of these versions.
# The same versions give the same bytes; needs node 18 or newer and npm.
set -eu
cd "$(dirname "$0")/.."
web=$PWD/src/penstock/report/charts/web
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# zrender and tslib are pinned by echarts itself.
npm init --yes >/dev/null
npm install --silent --no-audit --no-fund --save-exact echarts@6.1.0 esbuild@0.28.2

cat > entry.js <<'ENTRY'
import * as core from "echarts/core";
import { BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart } from "echarts/charts";
import {
  DataZoomComponent, GridComponent, MarkAreaComponent, MarkLineComponent, ToolboxComponent,
  TooltipComponent, VisualMapContinuousComponent,
} from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

core.use([
  BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart, DataZoomComponent, GridComponent,
  MarkAreaComponent, MarkLineComponent, ToolboxComponent, TooltipComponent,
  VisualMapContinuousComponent, CanvasRenderer,
]);
export const { init, version } = core;
ENTRY

npx esbuild entry.js --bundle --minify --format=iife --global-name=echarts --target=es2020 \
    --define:process.env.NODE_ENV='"production"' --legal-comments=none --charset=ascii \
    --banner:js="/*! Apache ECharts 6.1.0, Apache-2.0; with zrender 6.1.0, BSD-3-Clause; LICENSE.echarts */" \
    --outfile="$web/echarts.min.js"
{
    cat node_modules/echarts/NOTICE
    printf '\n\n======== Apache ECharts ========\n\n'
    cat node_modules/echarts/LICENSE
    printf '\n======== d3 (parts, inside of Apache ECharts) ========\n\n'
    cat node_modules/echarts/licenses/LICENSE-d3
    printf '\n======== zrender ========\n\n'
    cat node_modules/zrender/LICENSE
    printf '\n======== tslib ========\n\n'
    cat node_modules/tslib/LICENSE.txt
} > "$web/LICENSE.echarts"
ls -l "$web"
